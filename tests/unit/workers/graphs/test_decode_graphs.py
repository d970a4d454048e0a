"""Decode graphs on a CPU, by closures in CUDA graphs' place: what is staged, padded, replayed."""

import random
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from attention.backends.base import GraphAttentionBackend
from attention.backends.torch_native import TorchNativeBackend
from attention.forward_batch import ForwardBatch
from attention.graph_timing import GraphAttentionTimer
from attention.roofline import attention_step_cost
from tests.fakes.tiny_models import NATIVE, VOCAB_SIZE, save_tiny_model
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest
from workers.graphs.decode_graphs import (
    AttentionTwins,
    DecodeGraphs,
    GraphedStep,
    batch_size_ladder,
)
from workers.graphs.decode_step import StepRows, TorchStepKernels
from workers.graphs.measured_turns import MeasuredTurns
from workers.graphs.ring import StagingRing
from workers.parallel.group import SingleRank
from workers.runner.model_runner import ModelRunner
from workers.runner.step_inputs import LaunchedStep
from workers.sampling.params import SamplingParams
from workers.scheduler.plan import NAN_TOKEN, StepPlan
from workers.scheduler.scheduler import MAX_UNCOMMITTED_PLANS

MAX_ROWS = 8
SIZES = [1, 4, MAX_ROWS]
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.0, seed=3, logprobs=2, max_tokens=12, ignore_eos=True)


class ReplayableTorchBackend(TorchNativeBackend, GraphAttentionBackend):
    """torch_native whose metadata a replay renews, from device tensors only: the host copies of
    a captured batch are as old as the capture. Padding rows have no keys."""

    def init_cuda_graph_state(self, max_bs: int) -> None:
        self.max_bs = max_bs

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """record_step_tables makes everything."""

    def record_step_tables(self, forward_batch: ForwardBatch) -> None:
        seq_lens = forward_batch.seq_lens.numpy().copy()
        self.init_forward_metadata(
            replace(
                forward_batch,
                seq_lens_cpu=seq_lens,
                extend_prefix_lens_cpu=np.maximum(seq_lens - 1, 0),
            )
        )


class ClosureCapturer:
    """A replay runs the closure again and puts its result where the capture's was. The capture's
    own run is the trial, as recording runs nothing."""

    def __init__(self):
        self.num_replays = 0

    def capture(self, run):
        out = run()

        def replay():
            self.num_replays += 1
            out.copy_(run())

        return replay, out


class TwoSecondEvent:
    """A device event that is always past, 2 s before the next."""

    def record(self):
        """The device's clock is not modelled."""

    def query(self):
        return True

    def elapsed_time(self, end_event):
        return 2000.0


class GraphedCpuRunner(ModelRunner):
    num_padding_slots, _adapted_graphs = 1, ()
    graph_backend = ReplayableTorchBackend

    def use_graphs(self, sizes, interval_steps=0):
        self._backend = self.graph_backend(
            self._backend.config,
            self._backend.req_to_token_pool,
            self._backend.token_to_kv_pool,
        )
        self._timer._backend = self._backend
        self.capturer = ClosureCapturer()
        tables = self._backend.req_to_token_pool.own_tables
        self.graphs = DecodeGraphs(
            self._model,
            self._backend,
            TorchStepKernels(tables, self._sampling.last_token_ids),
            self.capturer,
            StagingRing.on_host(sizes[-1], MAX_UNCOMMITTED_PLANS, len(tables)),
            sizes,
            padding_slot=MAX_ROWS,
            twins=AttentionTwins(
                MeasuredTurns(interval_steps),
                lambda backend: GraphAttentionTimer(backend, TwoSecondEvent, TwoSecondEvent),
            ),
        )
        self.timings = []
        self.dummy_page_only = self._backend.token_to_kv_pool

    @torch.inference_mode()
    def _launch(self, plan):
        if self.graphs.covers(plan):
            self._sampling.admit(plan.admitted)
            self._inputs.apply_memory_writes(plan)
            step = self.graphs.run(plan, self._sampling)
            self.timings += self.graphs.drain_attention()
            return step if isinstance(step, GraphedStep) else LaunchedStep(step, ())
        launched = super()._launch(plan)
        self.capture_after(plan)
        return launched

    def capture_after(self, plan):
        self.graphs.capture_after(plan)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_model(NATIVE["llama3"], tmp_path_factory.mktemp("graphs")))


def config_of(folder, **changes):
    return EngineConfig(model=folder, page_size=4, max_running_requests=MAX_ROWS, **changes)


def prompts_of(num):
    rng = random.Random(1)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(2, 40))] for _ in range(num)]


def generate(config, runner, prompts, sampling):
    engine = Engine.of_runner(config, runner)
    try:
        results = engine.generate(prompts, sampling)
        engine.check_integrity()
        return results
    finally:
        engine.close()


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "seeded"])
@pytest.mark.parametrize("num_prompts", [1, 3, 13])
def test_replayed_steps_give_the_tokens_of_eager_ones(folder, sampling, num_prompts) -> None:
    config = config_of(folder, max_step_tokens=48)
    prompts = prompts_of(num_prompts)
    eager = generate(config, ModelRunner(config, SingleRank(), CPU, print), prompts, sampling)
    runner = GraphedCpuRunner(config, SingleRank(), CPU, print)
    runner.use_graphs(SIZES)
    graphed = generate(config, runner, prompts, sampling)
    assert [r.token_ids for r in graphed] == [r.token_ids for r in eager]
    assert runner.capturer.num_replays > GREEDY.max_tokens // 2
    for ours, theirs in zip(graphed, eager, strict=True):
        assert [e.rank for e in ours.logprobs] == [e.rank for e in theirs.logprobs]


def test_retraction_and_moved_pages_reach_the_next_replay(folder) -> None:
    config = config_of(folder, num_pages=24)
    prompts = prompts_of(6)
    eager = generate(config, ModelRunner(config, SingleRank(), CPU, print), prompts, GREEDY)
    runner = GraphedCpuRunner(config, SingleRank(), CPU, print)
    runner.use_graphs(SIZES)
    assert [r.token_ids for r in generate(config, runner, prompts, GREEDY)] == [
        r.token_ids for r in eager
    ]


def decode_plan(slots, prefix_lens, out_cache_loc):
    ones = np.ones(len(slots), dtype=np.int32)
    return StepPlan(
        step_id=0,
        is_decode=True,
        slots=np.array(slots, dtype=np.int32),
        num_new_tokens=ones,
        prefix_lens=np.array(prefix_lens, dtype=np.int32),
        samples=ones,
        input_ids=np.array([7 + slot for slot in slots], dtype=np.int32),
        out_cache_loc=np.array(out_cache_loc, dtype=np.int32),
    )


def move_pages(runner, new_page_of):
    """Move every page p of the pool to new_page_of[p]. The page table is left as it is."""
    pool = runner._backend.token_to_kv_pool
    for layer_id in range(runner._backend.config.num_layers):
        for buffer in pool.get_kv_buffer(layer_id):
            buffer[new_page_of] = buffer.clone()


def test_a_replay_reads_the_page_table_of_its_own_step(folder) -> None:
    """Between two replays of one graph all pages change places."""
    config = config_of(folder, num_pages=64)
    runner = GraphedCpuRunner(config, SingleRank(), CPU, print)
    runner.use_graphs([4])
    runner.graphs.capture(4)
    page_size, num_pages = 4, 65
    table = runner._backend.req_to_token_pool.req_to_token
    torch.manual_seed(0)
    pages = torch.randperm(num_pages - 1) + 1
    lengths = [9, 30, 17]
    for slot, length in enumerate(lengths):
        owned = pages[slot * 10 : slot * 10 + 10]
        tokens = (owned[:, None] * page_size + torch.arange(page_size)).flatten()
        table[slot, : length + 1] = tokens[: length + 1].int()
    for layer_id in range(runner._backend.config.num_layers):
        for buffer in runner._backend.token_to_kv_pool.get_kv_buffer(layer_id):
            buffer.normal_()

    def logits_of_replay():
        places = [int(table[slot, length]) for slot, length in enumerate(lengths)]
        with torch.inference_mode():
            runner.graphs.run(decode_plan([0, 1, 2], lengths, places), runner._sampling)
        (graph,) = runner.graphs._graphs.values()
        return graph.logits[:3].clone()

    before = logits_of_replay()
    new_page_of = torch.cat([torch.zeros(1, dtype=torch.long), torch.randperm(num_pages - 1) + 1])
    move_pages(runner, new_page_of)
    assert not torch.allclose(logits_of_replay(), before, atol=1e-3), "the pages did not move"
    old = table.long()
    table.copy_(new_page_of[old // page_size] * page_size + old % page_size)
    torch.testing.assert_close(logits_of_replay(), before)


def test_a_backend_hears_of_a_replay_and_its_lengths_before_it_is_launched(folder) -> None:
    runner = GraphedCpuRunner(config_of(folder, num_pages=64), SingleRank(), CPU, print)
    runner.use_graphs([4])
    told = []
    runner._backend.before_replay = lambda num_rows, seq_lens: told.append(
        (num_rows, seq_lens[:num_rows].tolist(), runner.capturer.num_replays)
    )
    runner.graphs.capture(4)
    with torch.inference_mode():
        runner.graphs.run(decode_plan([0, 1, 2], [9, 30, 17], [0, 1, 2]), runner._sampling)
    assert told == [(4, [10, 31, 18, 0], 0)]


def test_every_nth_replay_of_a_size_is_timed_once_it_has_a_twin(folder) -> None:
    config = config_of(folder)
    prompts = prompts_of(3)
    runner = GraphedCpuRunner(config, SingleRank(), CPU, print)
    runner.use_graphs([4], interval_steps=4)
    expected = generate(config, ModelRunner(config, SingleRank(), CPU, print), prompts, GREEDY)
    runner.graphs.capture(4)
    first = generate(config, runner, prompts, GREEDY)
    assert runner.capturer.num_replays == GREEDY.max_tokens - 1
    assert runner.timings == []
    assert runner.graphs.timed_sizes == []
    assert runner.graphs.capture_next()
    assert runner.graphs.timed_sizes == [4]
    assert not runner.graphs.capture_next()
    second = generate(config, runner, prompts, GREEDY)
    assert [r.token_ids for r in second] == [r.token_ids for r in first]
    assert [r.token_ids for r in second] == [r.token_ids for r in expected]
    assert len(runner.timings) == 3
    num_layers = runner._backend.config.num_layers
    assert {timing.seconds for timing in runner.timings} == {2.0 * num_layers}
    # Replays 12, 16 and 20 of the size: 11 were the first run's.
    lengths = [np.array([len(p) + n for p in prompts], dtype=np.int32) for n in (1, 5, 9)]
    assert [timing.bytes_read for timing in runner.timings] == [
        attention_step_cost(runner._backend.config, length, np.ones_like(length)).bytes_read
        for length in lengths
    ]


def test_sizes_come_before_twins_and_unused_sizes_get_none(folder) -> None:
    config = config_of(folder)
    runner = GraphedCpuRunner(config, SingleRank(), CPU, print)
    runner.use_graphs(SIZES, interval_steps=2)
    for _ in SIZES:
        assert runner.graphs.capture_next()
    assert runner.graphs.captured_sizes == SIZES
    assert not runner.graphs.capture_next()
    generate(config, runner, prompts_of(1), GREEDY)
    assert runner.graphs.timed_sizes == []
    generate(config, runner, prompts_of(1), GREEDY)
    assert runner.graphs.timed_sizes == [1]


class CapturingExecutor:
    """Captures while idle, as the executor of a CUDA device does."""

    def __init__(self, inner, graphs):
        self.launch, self.close = inner.launch, inner.close
        self.provide, self.forget_masks = inner.provide, inner.forget_masks
        self.prepare_while_idle = graphs.capture_next


def test_an_idle_engine_captures_all_sizes_and_a_busy_one_none(folder) -> None:
    config = config_of(folder)
    runner = GraphedCpuRunner(config, SingleRank(), CPU, print)
    runner.use_graphs(SIZES)
    engine = Engine.of_runner(
        config, runner, wrap_executor=lambda inner: CapturingExecutor(inner, runner.graphs)
    )
    engine.submit(GenerateRequest("one", [3, 4, 5], GREEDY))
    assert not engine.prepare_while_idle()
    assert runner.graphs.captured_sizes == []
    engine.abort("one")
    while engine.has_work:
        engine.step()
    assert [engine.prepare_while_idle() for _ in range(4)] == [True, True, True, False]
    assert runner.graphs.captured_sizes == SIZES
    engine.close()


def test_padding_rows_touch_the_dummy_page_and_their_own_slot_only(folder) -> None:
    config = config_of(folder)
    runner = GraphedCpuRunner(config, SingleRank(), CPU, print)
    runner.use_graphs(SIZES)
    k_pool, _ = runner.dummy_page_only.get_kv_buffer(0)
    table = runner._backend.req_to_token_pool.req_to_token
    table.fill_(5)
    runner.graphs.capture(MAX_ROWS)
    assert not k_pool[1:].any()
    assert (table[:MAX_ROWS] == 5).all()


def test_each_size_is_captured_once_largest_first_beside_prefills(folder) -> None:
    config = config_of(folder)
    runner = GraphedCpuRunner(config, SingleRank(), CPU, print)
    runner.use_graphs(SIZES)
    generate(config, runner, prompts_of(1), GREEDY)
    assert runner.graphs.captured_sizes == [1, MAX_ROWS]
    generate(config, runner, prompts_of(3), GREEDY)
    assert runner.graphs.captured_sizes == SIZES


def test_the_ladder_ends_at_the_limit_and_ascends() -> None:
    for limit in (1, 3, 8, 100, 256, 500):
        ladder = batch_size_ladder(limit)
        assert ladder[-1] == limit
        assert ladder == sorted(set(ladder))
    assert 256 in batch_size_ladder(256)
    assert max(np.diff(batch_size_ladder(256))) <= 32


def test_step_ends_resolve_tokens_write_the_table_and_mark_nans() -> None:
    table, windows = torch.zeros((2, 4, 6), dtype=torch.int32)
    last = torch.tensor([10, 11, 12, 13])
    kernels = TorchStepKernels((table, windows), last)
    rows = StepRows.allocate(3, CPU, 2)
    staging = StagingRing.on_host(3, 1, 2)
    staging.take()
    slot = staging.take()
    slot.rows[:] = [[2, 0, 3], [5, 1, 0], [-1, 7, 0], [21, 9, 0], [31, 5, 0]]
    staging.point_device_at(slot)
    kernels.begin(staging.ring, rows)
    assert rows.input_ids.tolist() == [12, 7, 0]
    assert rows.seq_lens.tolist() == [5, 1, 0]
    assert rows.positions.tolist() == rows.prefix_lens.tolist() == [4, 0, 0]
    assert (table[2, 4], table[0, 0]) == (21, 9)
    assert (windows[2, 4], windows[0, 0]) == (31, 5)
    assert rows.out_cache_loc.tolist() == [21, 9, 0]
    assert [locs.tolist() for locs in rows.bounded_cache_locs] == [[31, 5, 0]]
    logits = torch.tensor([[0.0, 3.0, 3.0], [float("nan"), 1.0, 2.0], [5.0, 1.0, 0.0]])
    kernels.end(logits, rows.slots, staging.ring)
    assert slot.sampled.tolist() == [1, NAN_TOKEN, 0]
    slot.check_answered(slot.step)
    assert last.tolist() == [0, 11, 1, 0]


def test_a_plan_and_what_is_captured_behind_it_take_one_slot_together(folder) -> None:
    runner = GraphedCpuRunner(config_of(folder), SingleRank(), CPU, print)
    runner.use_graphs(SIZES, interval_steps=2)
    graphs, taken = runner.graphs, []
    runner.graphs.capture(MAX_ROWS)
    plans = [decode_plan(range(size), [3] * size, [0] * size) for size in SIZES]
    prefill = msgspec.structs.replace(plans[0], is_decode=False)
    with torch.inference_mode():
        for plan in [*plans, prefill, prefill, *plans * 3, prefill, prefill]:
            before = graphs._staging._num_taken
            if graphs.covers(plan):
                graphs.run(plan, runner._sampling)
            graphs.capture_after(plan)
            taken.append(graphs._staging._num_taken - before)
    assert graphs.captured_sizes == SIZES
    assert len(graphs.timed_sizes) == 2
    assert max(taken) == 1
