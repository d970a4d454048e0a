"""Experts' products with kept weights against their dequantised matrices, and an engine of them."""

import pytest
import torch

pytest.importorskip("triton")

from attention.kernels.providers import probe_gluon
from tests.fakes.quantised_checkpoints import quantise_folder
from tests.fakes.tiny_models import MIXTURES, VOCAB_SIZE, TinyModel, save_tiny_model
from tests.gpu.engines import CUDA, GREEDY, generate, prompts_of
from tests.gpu.needs import HAS_GPU, NEEDS_GPU, NEEDS_HOPPER
from tests.gpu.workers import test_fp4_experts as mxfp4
from tests.unit.workers.loading.test_quantised_experts import STACKS, WIDE, quantise_stacks
from workers.config import EngineConfig
from workers.layers.cuda.expert_routing import choose_by_softmax
from workers.layers.cuda.norm import add_rms_norm_
from workers.layers.kept.experts import KeptExperts
from workers.layers.kept.stacks import Fp8Stack
from workers.layers.moe.experts import Experts
from workers.layers.quantised.expert_fp8 import RoundedTiles
from workers.layers.quantised.expert_products import (
    TABLES,
    AsKept,
    InSplits,
    kept_partial_products,
)
from workers.layers.quantised.expert_splits import SplitShape, SplitTiles
from workers.layers.quantised.expert_warpgroups import Fp8WarpgroupTiles
from workers.layers.routed_experts import SILU, Gating, RoutedWeights, routed_in_torch
from workers.loading.loader import load_model
from workers.parallel.group import SingleRank

pytestmark = [*NEEDS_GPU, NEEDS_HOPPER]
NUM_EXPERTS, NUM_CHOSEN = 8, 2
ROUNDED = 1e-2
"""Relative, of two products with a rounding to 16 bits between and behind them."""
ROUNDED_TO_FP8 = 5e-2
"""The same with activations of both in FP8."""
ROUNDED_ALIKE = 3e-2
"""Of two ways to FP8: where one rounds to 16 bits before, some values become their neighbours."""
NEEDS_GLUON = pytest.mark.skipif(
    not (HAS_GPU and probe_gluon().is_available), reason="another Triton than Gluon's"
)
FP8_WAYS = (
    pytest.param(Fp8WarpgroupTiles(3), marks=NEEDS_GLUON),
    pytest.param(Fp8WarpgroupTiles(4), marks=NEEDS_GLUON),
)
FEW_ROWS = max(most for most, way in TABLES[Fp8Stack] if isinstance(way, AsKept | InSplits))


def fp4_stack(rows, columns):
    return mxfp4.fp4_stack(NUM_EXPERTS, rows, columns)


def fp8_stack(rows, columns):
    stack = Fp8Stack(NUM_EXPERTS, rows, columns, CUDA)
    for place in range(NUM_EXPERTS):
        values = (torch.randn(rows, columns, device=CUDA) * 64).clamp(-448, 448)
        scales = torch.rand(rows // 128, columns // 128, device=CUDA) * 1e-3
        stack.take(place, 0, values.to(torch.float8_e4m3fn), scales)
    return stack


@pytest.mark.parametrize("num_tokens", [1, 3, 40, 130, 250, 700, 1000])
@pytest.mark.parametrize(
    ("stack", "hidden_size", "width", "gating"),
    [
        (fp4_stack, 288, 160, Gating(1.702, 7.0)),
        (fp4_stack, 2880, 2880, Gating(1.702, 7.0)),
        (fp8_stack, 2048, 768, SILU),
    ],
)
def test_products_are_those_of_dequantised_experts(
    stack, hidden_size, width, gating, num_tokens
) -> None:
    gate_up, down = stack(2 * width, hidden_size), stack(hidden_size, width)
    biases = [None, None]
    if stack is fp4_stack:
        sizes = (2 * width, hidden_size)
        biases = [torch.randn(NUM_EXPERTS, n, device=CUDA).bfloat16() for n in sizes]
    kept = KeptExperts(gate_up, down, gating, *biases)
    wide = [None if one is None else one.float() for one in biases]
    plain = RoutedWeights(gate_up.dequantised(), down.dequantised(), gating, *wide)
    x = torch.randn(num_tokens, hidden_size, device=CUDA).bfloat16()
    logits = torch.randn(num_tokens, NUM_EXPERTS, device=CUDA)
    chosen = choose_by_softmax(logits, NUM_CHOSEN, 0, 1.0, True)
    parts = kept_partial_products(x, chosen, kept)
    assert parts.shape[0] % NUM_CHOSEN == 0
    assert parts.shape[1:] == (num_tokens, hidden_size)
    some = slice(0, 60)
    want = routed_in_torch(x[some].float(), chosen.ids[some], chosen.weights[some], plain)
    got = parts[:, some].float().sum(0)
    is_in_fp8 = stack is fp8_stack and num_tokens * NUM_CHOSEN / NUM_EXPERTS > FEW_ROWS
    bound = ROUNDED_TO_FP8 if is_in_fp8 else ROUNDED
    assert (got - want).norm() / want.norm() < bound


@pytest.mark.parametrize("num_tokens", [5, 300, 3000])
@pytest.mark.parametrize("num_parts", [1, 2])
@pytest.mark.parametrize("way", FP8_WAYS, ids=str)
def test_ways_of_fp8_agree_in_every_replay(way, num_parts, num_tokens) -> None:
    """num_parts: with two, other ranks have an expert of which nothing is computed here."""
    kept = KeptExperts(fp8_stack(1536, 2048), fp8_stack(2048, 768), SILU, None, None)
    x = torch.randn(num_tokens, 2048, device=CUDA).bfloat16()
    logits = torch.randn(num_tokens, NUM_EXPERTS + num_parts - 1, device=CUDA)
    # An expert without rows, and one with more than others.
    logits[:, 3], logits[:, 1] = -torch.inf, logits[:, 1] + 1.0

    def run(one):
        chosen = choose_by_softmax(logits, NUM_CHOSEN, 0, 1.0, True)
        return one.products(x, chosen, kept, num_parts).float().sum(0)

    want, _ = run(RoundedTiles(64, 3, 8)), run(way)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(way)
    for _ in range(20):
        got.zero_()
        graph.replay()
        assert (got - want).norm() / want.norm() < ROUNDED_ALIKE


def layers_of(stack, hidden_size, width, gating, num_layers):
    """Experts of layers that have other weights each."""
    layers = []
    for _ in range(num_layers):
        gate_up, down = stack(2 * width, hidden_size), stack(hidden_size, width)
        biases = [None, None]
        if stack is fp4_stack:
            sizes = (2 * width, hidden_size)
            biases = [torch.randn(NUM_EXPERTS, n, device=CUDA).bfloat16() for n in sizes]
        layers.append(KeptExperts(gate_up, down, gating, *biases))
    return layers


@pytest.mark.parametrize(
    ("columns", "splits"), [(32, (1, 2)), (64, (2, 1)), (32, (4, 4)), (64, (8, 3))], ids=str
)
@pytest.mark.parametrize("num_tokens", [1, 40])
@pytest.mark.parametrize(
    ("stack", "hidden_size", "width", "gating"),
    [
        (fp4_stack, 288, 160, Gating(1.702, 7.0)),
        (fp4_stack, 2880, 2880, Gating(1.702, 7.0)),
        (fp8_stack, 2048, 768, SILU),
    ],
)
def test_splits_are_joined_alike_in_every_replay(
    stack, hidden_size, width, gating, num_tokens, splits, columns
) -> None:
    """Layers one after the other, as a step has them: each kernel starts while the one before ends,
    and takes memory that the graph has used before, counters too."""
    layers = layers_of(stack, hidden_size, width, gating, num_layers=3)
    gate_up, down = SplitShape(columns, splits[0], 4, 4), SplitShape(64, splits[1], 4, 4)
    way = InSplits(SplitTiles(16, gate_up, down))
    x = torch.randn(num_tokens, hidden_size, device=CUDA).bfloat16()
    logits = torch.randn(len(layers), num_tokens, NUM_EXPERTS, device=CUDA)
    weight = torch.ones(hidden_size, device=CUDA, dtype=torch.bfloat16)

    def run(check):
        hidden, residual = x, x.clone()
        for one, scores in zip(layers, logits, strict=True):
            chosen = choose_by_softmax(scores, NUM_CHOSEN, 0, 1.0, True)
            parts = way.products(hidden, chosen, one, 1)
            check(hidden, chosen, one, parts)
            hidden = add_rms_norm_(parts, residual, weight, 1e-6)
        return hidden, residual

    def compare(hidden, chosen, kept, parts):
        num_parts = NUM_CHOSEN * min(splits[1], kept.down.num_turns)
        assert parts.shape == (num_parts, num_tokens, hidden_size)
        biases = [
            None if bias is None else bias.float() for bias in (kept.gate_up_bias, kept.down_bias)
        ]
        plain = RoutedWeights(kept.gate_up.dequantised(), kept.down.dequantised(), gating, *biases)
        want = routed_in_torch(hidden.float(), chosen.ids, chosen.weights, plain)
        assert (parts.float().sum(0) - want).norm() / want.norm() < ROUNDED

    wanted = [one.clone() for one in run(compare)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(lambda *_: None)
    differing = torch.zeros((), dtype=torch.int64, device=CUDA)
    for _ in range(200):
        graph.replay()
        differing += sum((a != b).sum() for a, b in zip(got, wanted, strict=True))
    assert int(differing) == 0


def test_an_engine_keeps_mxfp4(tmp_path) -> None:
    tiny = MIXTURES["gpt_oss"]
    changes = {**tiny.changes, **WIDE, "head_dim": 32}
    folder = save_tiny_model(TinyModel(tiny.model_type, changes), tmp_path)
    quantise_stacks(folder)
    quantise_folder(folder, STACKS, lambda module: None)
    config = EngineConfig(model=str(folder), dtype="bfloat16")
    model = load_model(config, SingleRank(), CUDA, torch.bfloat16).model
    layers = [one for one in model.layers_as_stored() if isinstance(one, Experts)]
    assert layers
    assert all(one.is_kept for one in layers)
    del model, layers
    prompts = prompts_of(4, VOCAB_SIZE, longest=30)
    texts = [
        generate(
            EngineConfig(
                model=str(folder),
                max_running_requests=8,
                dtype="bfloat16",
                num_pages=200,
                **ways,
            ),
            prompts,
            GREEDY,
        )
        for ways in ({}, {"enable_cuda_graphs": False}, {"quantized_products": "dequantize"})
    ]
    assert texts[0] == texts[1]
    # MXFP4 is exact in bfloat16: only the order of sums differs.
    assert sum(a[0] == b[0] for a, b in zip(texts[0], texts[2], strict=True)) >= 3
