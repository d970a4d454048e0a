"""Adapters on routed experts on an NVIDIA GPU: kernels in bfloat16 against plain torch in float32,
and the same kernels in a captured graph."""

from dataclasses import fields

import pytest
import torch

from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_GPU

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from tests.fakes.interpreted_expert_adapters import (
    GPT_OSS,
    RANKS,
    Case,
    plain,
    without_adapters,
)
from workers.layers.cuda.expert_adapters import ExpertAdapterTiles, adapted_partial_products
from workers.layers.cuda.expert_routing import counted
from workers.layers.routed_experts import SILU

pytestmark = NEEDS_GPU

NUM_EXPERTS, NUM_CHOSEN = 8, 4
MAX_ERROR = 0.03
"""Of bfloat16, which rounds what is added, what is activated and the result."""


def moved(value, device):
    """A dataclass of tensors."""
    values = {field.name: getattr(value, field.name) for field in fields(value)}
    tensors = {name: one.to(device) for name, one in values.items() if torch.is_tensor(one)}
    return type(value)(**(values | tensors))


def case_of(num_tokens, max_rank, gating=SILU, num_elsewhere=0):
    torch.manual_seed(0)
    ranks = [*RANKS[:2], (max_rank, max_rank, max_rank), (max_rank, 0, max_rank // 2 + 1)]
    return Case(
        torch.randint(0, len(ranks) + 1, (num_tokens,)).tolist(),
        [tuple(min(one, max_rank) for one in each) for each in ranks],
        max_rank,
        num_here=NUM_EXPERTS,
        num_elsewhere=num_elsewhere,
        num_chosen=NUM_CHOSEN,
        hidden=360,
        width=200,
        gating=gating,
        has_bias=gating is GPT_OSS,
        dtype=torch.bfloat16,
        rank_block=ExpertAdapterTiles.of(128).rank_block(max_rank),
    )


def run(x, ids, shares, experts, matrices, slots, num_parts=1):
    chosen = counted(shares, ids.int(), NUM_EXPERTS + num_parts - 1)
    return adapted_partial_products(x, chosen, experts, matrices, slots, num_parts)


def check_close(found, wanted):
    error = (found.float().cpu() - wanted).abs()
    assert error.max() <= MAX_ERROR * wanted.abs().max()
    assert error.mean() <= MAX_ERROR / 3 * wanted.abs().mean()


# On average 0.5, 16, 32, 64 and 350 rows an expert: blocks of 16 to 128.
@pytest.mark.parametrize(
    ("num_tokens", "max_rank"), [(1, 16), (32, 1), (64, 40), (128, 64), (700, 256)]
)
@pytest.mark.parametrize("gating", [SILU, GPT_OSS], ids=["silu", "gpt_oss"])
@pytest.mark.parametrize("num_elsewhere", [0, NUM_EXPERTS])
def test_experts_add_what_plain_torch_adds(num_tokens, max_rank, gating, num_elsewhere) -> None:
    case = case_of(num_tokens, max_rank, gating, num_elsewhere)
    experts, matrices, (ids, shares) = case.experts(), case.matrices(), case.choice()
    num_parts = 2 if num_elsewhere else 1
    x = torch.randn(num_tokens, case.hidden).bfloat16()
    slots = torch.tensor(case.tokens, dtype=torch.int32)
    wanted = plain(x, ids, shares, experts, matrices, slots)
    on_device = moved(experts, CUDA)
    given = x.to(CUDA), ids.to(CUDA), shares.to(CUDA), on_device
    found = run(*given, moved(matrices, CUDA), slots.to(CUDA), num_parts)
    check_close(found, wanted)
    chosen = counted(given[2], given[1].int(), NUM_EXPERTS + num_parts - 1)
    bare = without_adapters(given[0], chosen, on_device, num_parts)
    is_bare = slots == 0
    assert torch.equal(found[:, is_bare], bare[:, is_bare])


def graph_of(run):
    """torch's way, with one call before it that compiles."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


@pytest.mark.parametrize("num_tokens", [1, 64, 512])
def test_a_graph_replays_with_other_adapters_and_other_experts(num_tokens) -> None:
    """Layers behind each other, whose kernels may start before their predecessors have ended."""
    case = case_of(num_tokens, 48)
    layers = [(moved(case.experts(), CUDA), moved(case.matrices(), CUDA)) for _ in range(4)]
    ids, shares = (one.to(CUDA) for one in case.choice())
    x = torch.randn(num_tokens, case.hidden, device=CUDA).bfloat16()
    slots = torch.zeros(num_tokens, dtype=torch.int32, device=CUDA)

    def step():
        hidden = x
        for experts, matrices in layers:
            parts = run(hidden, ids, shares, experts, matrices, slots)
            hidden = torch.nn.functional.rms_norm(hidden + parts.sum(0), hidden.shape[-1:])
        return parts, hidden

    graph, (parts, replayed) = graph_of(step)
    graph.replay()
    without = replayed.clone()
    for seed in range(4):
        slots.copy_(torch.randint(1, len(case.ranks) + 1, slots.shape))
        ids.copy_(case.choice()[0])
        last = layers.pop()
        last_input = step()[1]
        layers.append(last)
        wanted = plain_on_cpu(last_input, ids, shares, last, slots)
        for _ in range(20):
            expected = step()
            graph.replay()
            assert torch.equal(replayed, expected[1]), seed
        check_close(parts, wanted)
        assert not torch.equal(replayed, without)


def plain_on_cpu(x, ids, shares, layer, slots):
    given = (one.cpu() for one in (x, ids, shares))
    return plain(*given, *(moved(one, torch.device("cpu")) for one in layer), slots.cpu())
