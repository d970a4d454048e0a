"""Heads that read plain steps within the target's graphs on an NVIDIA GPU: what a replay keeps is
what is kept eagerly, bit for bit, and drafts behind it are the published ones."""

from itertools import cycle

import numpy as np
import pytest
import torch

from attention.forward_batch import ForwardBatch, ForwardMode
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.registry import create_attention_backend
from tests.fakes.eagle_heads import eagle_spec
from tests.fakes.tiny_models import MIXTURES
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_GPU
from tests.gpu.workers.test_draft_models_cuda import save_eagle, save_mtp
from tests.unit.workers.engine.test_rank_drafts import FEW_PAGES, recorded_run
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.graphs.graph_set import CudaGraphCapturer
from workers.graphs.tapped_model import ReadBesideLogits, TappedModel
from workers.layers.cuda.side_stream import CudaSideStream
from workers.layers.sharding import ShardContext, weight_slots
from workers.models.cuda_eagle_head import CudaEagleHead
from workers.models.token_inputs import ModelOutput, TokenInputs
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.runner.kv_memory import create_kv_pool
from workers.scheduler import scheduler
from workers.speculation.device_pairs import DevicePairs
from workers.speculation.pairs import FIRST_PAIR
from workers.speculation.policy import FixedLength

pytestmark = NEEDS_GPU

LENGTHS = (0, 0, 3, 0, 3, 3, 0, 0, 0)
MAX_CONTEXT_LEN, NUM_SLOTS, NUM_TOKENS = 256, 9, 4096
PADDING_SLOT = NUM_SLOTS - 1
E4M3 = torch.float8_e4m3fn


class AlternatingLength(FixedLength):
    """Plain steps and such with drafts, whatever they take."""

    def __init__(self):
        super().__init__(max(LENGTHS))
        self._lengths = cycle(LENGTHS)

    def choose(self, most):
        return next(self._lengths)


def drafter_of(kv_dtype):
    """Over tables whose positions stand anywhere, with states of all of them."""
    head = CudaEagleHead(eagle_spec(), 256, ShardContext(SingleRank(), torch.bfloat16, CUDA)).eval()
    random = torch.Generator().manual_seed(7)
    for slot in weight_slots(head).values():
        slot.load((torch.randn(slot.shape, generator=random) * 0.1).bfloat16())
    config = head.geometry.attention_config(MAX_CONTEXT_LEN, 1, torch.bfloat16, kv_dtype, CUDA)
    tables = ReqToTokenPool(NUM_SLOTS, MAX_CONTEXT_LEN, CUDA)
    places = 1 + torch.randperm(NUM_TOKENS - 1, generator=random)
    tables.req_to_token.view(-1).copy_(places[: tables.req_to_token.numel()])
    tables.req_to_token[PADDING_SLOT] = 0
    pool = create_kv_pool(config, (NUM_TOKENS,), ())
    name = "triton" if kv_dtype is not E4M3 else "triton_fp8"
    backend = create_attention_backend(name, config, tables.without_first(FIRST_PAIR), pool)
    states = torch.randn(NUM_TOKENS, 256, generator=random).bfloat16().to(CUDA)
    return DevicePairs(head, backend, tables.req_to_token, states)


def batch_of(drafter, size, num_rows, seed):
    """num_rows rows, the first of them at a first token, and padding, as of a decode graph."""
    random = torch.Generator().manual_seed(seed)
    slots = torch.full((size,), PADDING_SLOT)
    slots[:num_rows] = torch.randperm(PADDING_SLOT, generator=random)[:num_rows]
    positions = torch.randint(1, MAX_CONTEXT_LEN, (size,), generator=random)
    positions[0] = positions[num_rows:] = 0
    ids = torch.randint(0, 131, (size,), generator=random)
    slots, positions, ids = slots.to(CUDA), positions.to(CUDA), ids.to(CUDA)
    lens = np.ones(size, dtype=np.int32)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=size,
        num_tokens=size,
        input_ids=ids,
        positions=positions,
        req_pool_indices=slots,
        seq_lens=positions.int() + 1,
        extend_seq_lens=torch.ones_like(positions).int(),
        extend_prefix_lens=positions.int(),
        out_cache_loc=drafter._table[slots, positions].long(),
        seq_lens_cpu=lens,
        extend_seq_lens_cpu=lens,
        extend_prefix_lens_cpu=lens,
        attn_backend=drafter.backend,
        is_captured=True,
    )


def kept(drafter):
    """Of all but the dummy page, where rows that pad a batch write by turns."""
    tensors = (drafter._states, *(one[0].flatten(0, 1) for one in drafter._pool.tensors()))
    return [one[1:].view(torch.uint8).clone() for one in tensors]


class HandedOver:
    """As GraphedModel: taps are copies that nobody keeps, and logits take memory of their size."""

    state_entries = ()

    def __init__(self, taps):
        self._taps = taps
        self._vocabulary = torch.randn(32768, 256, device=CUDA).bfloat16()

    def __call__(self, tokens, batch):
        taps = tuple(tap.clone() for tap in self._taps)
        return ModelOutput(taps[0] + taps[1], taps)

    def local_logits(self, hidden):
        for _ in range(8):
            hidden = torch.full_like(hidden, 7.0) - hidden
        return hidden @ self._vocabulary.t()


@pytest.mark.parametrize("is_beside", [True, False], ids=["beside", "before"])
@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize(("size", "num_rows"), [(1, 1), (4, 3), (8, 8), (64, 7)])
@torch.inference_mode()
def test_a_replay_keeps_what_is_kept_eagerly(size, num_rows, kv_dtype, is_beside):
    """Of several steps, each with rows of its own, whose tensors the graph knows. Beside the
    logits, too, whose tensors might take the place of what is read."""
    graphed, eager = drafter_of(kv_dtype), drafter_of(kv_dtype)
    static = batch_of(graphed, size, num_rows, seed=0)
    taps = [torch.zeros(size, 256, dtype=torch.bfloat16, device=CUDA) for _ in range(3)]
    own = HandedOver(taps)

    def read(batch, given):
        # Logits are there, and their memory is taken, before anything is read.
        torch.cuda._sleep(200_000)
        graphed.behind_decode(batch, given)

    if is_beside:
        model = ReadBesideLogits(own, read, False, CudaSideStream.on(CUDA))
    else:
        model = TappedModel(own, read, False)

    def run():
        tokens = TokenInputs(static.input_ids, static.positions)
        return model.local_logits(model(tokens, static).hidden)

    before = kept(eager)
    # A trial writes where its rows stand.
    static.req_pool_indices.fill_(PADDING_SLOT)
    static.positions.zero_()
    static.out_cache_loc.zero_()
    replay, logits = CudaGraphCapturer(CUDA).capture(run)
    for kept_here, other in zip(kept(graphed), before, strict=True):
        assert torch.equal(kept_here, other)
    for seed in range(3):
        step = batch_of(eager, size, num_rows, seed)
        fields = "input_ids", "positions", "req_pool_indices", "out_cache_loc"
        for field in fields:
            getattr(static, field).copy_(getattr(step, field))
        for tap in taps:
            tap.normal_()
        logits.zero_()
        replay()
        assert torch.equal(logits, own.local_logits(taps[0] + taps[1]))
        eager.behind_decode(step, taps)
        for kept_here, other in zip(kept(graphed), kept(eager), strict=True):
            assert torch.equal(kept_here, other)
    assert not all(map(torch.equal, kept(eager), before))


@pytest.mark.parametrize(
    ("save", "settings", "least"),
    [
        (save_eagle, {}, 0.8),
        (save_eagle, {"attention_backend": "triton"}, 0.8),
        (save_eagle, {"attention_timing_interval_steps": 2}, 0.8),
        (lambda folder: save_mtp(MIXTURES["glm4_moe"], folder), {}, 0.8),
    ],
    ids=["eagle", "eagle-triton", "eagle-timed", "mtp"],
)
def test_drafts_behind_plain_replays_are_the_published_ones(
    save, settings, least, tmp_path, monkeypatch
):
    """Over chunks, cached prefixes, retraction and slots that change hands. In bfloat16 near ties
    may turn, of few tokens that may be said."""
    monkeypatch.setattr(scheduler, "make_policy", lambda *config: AlternatingLength())
    target, speculative, oracle = save(tmp_path)
    config = EngineConfig(
        model=str(target),
        speculative=speculative,
        draft_policy="fixed",
        max_draft_tokens=3,
        **{"dtype": "bfloat16", **FEW_PAGES, **settings},
    )
    runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
    engine = Engine.of_runner(config, runner)
    while engine.prepare_while_idle():
        pass
    counts = {"replays": 0, "read behind": 0}
    graphs, drafter = runner._graphs, runner._device_drafter
    replay, behind = graphs.replay, drafter.behind

    def counted_replay(plan):
        counts["replays"] += 1
        return replay(plan)

    def counted_behind(step, taps):
        counts["read behind"] += step.plan.is_decode
        behind(step, taps)

    graphs.replay, drafter.behind = counted_replay, counted_behind
    asked, stats = recorded_run(runner, engine)
    assert counts["replays"] > 10
    assert counts["read behind"] == 0
    pairs = [(one.drafts, oracle.drafts(one.token_ids, len(one.drafts))) for one in asked[::3]]
    is_right = [found == wanted for found, wanted in pairs]
    assert len(is_right) > 4
    assert np.mean(is_right) >= least
    assert stats.num_accepted_draft_tokens > 0
    assert stats.num_cached_prompt_tokens > 0
    assert stats.num_preemptions > 0
