"""Decode graphs on a CPU: what is staged, padded, captured and replayed, with a recorded closure
in place of a CUDA graph."""

import random

import numpy as np
import pytest
import torch

from attention.backends.base import GraphAttentionBackend
from attention.backends.torch_native import TorchNativeBackend
from attention.forward_batch import ForwardBatch
from tests.fakes.tiny_models import NATIVE, VOCAB_SIZE, save_tiny_model
from workers.config import EngineConfig
from workers.cuda_graph_runner import DecodeGraphs, GraphedStep, batch_size_ladder
from workers.decode_step import StepRows, TorchStepKernels
from workers.engine import Engine
from workers.model_runner import LaunchedStep, ModelRunner
from workers.parallel.group import SingleRank
from workers.sampling.params import SamplingParams
from workers.scheduler.plan import NAN_TOKEN
from workers.staging import StagingRing

MAX_ROWS = 8
SIZES = [1, 4, MAX_ROWS]
CPU = torch.device("cpu")
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
RANDOM = SamplingParams(temperature=1.0, seed=3, logprobs=2, max_tokens=12, ignore_eos=True)


class ReplayableTorchBackend(TorchNativeBackend, GraphAttentionBackend):
    """torch_native whose metadata a replay renews. Padding rows have no keys."""

    def init_cuda_graph_state(self, max_bs: int) -> None:
        self.max_bs = max_bs

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        self.init_forward_metadata(forward_batch)

    def init_forward_metadata_replay_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        self.init_forward_metadata(forward_batch)


class ClosureCapturer:
    """A replay runs the closure again and puts its result where the capture's was."""

    def __init__(self):
        self.num_replays = 0

    def capture(self, run):
        out = run()

        def replay():
            self.num_replays += 1
            out.copy_(run())

        return replay, out


class GraphedCpuRunner(ModelRunner):
    num_padding_slots = 1

    def use_graphs(self, sizes):
        self._backend = ReplayableTorchBackend(
            self._backend.config,
            self._backend.req_to_token_pool,
            self._backend.token_to_kv_pool,
        )
        self._timer._backend = self._backend
        self.capturer = ClosureCapturer()
        self.graphs = DecodeGraphs(
            self._model,
            self._backend,
            TorchStepKernels(
                self._backend.req_to_token_pool.req_to_token, self._sampling.last_token_ids
            ),
            self.capturer,
            StagingRing.on_host(sizes[-1]),
            sizes,
            padding_slot=MAX_ROWS,
        )
        self.dummy_page_only = self._backend.token_to_kv_pool

    @torch.inference_mode()
    def _launch(self, plan):
        if self.graphs.covers(plan):
            self._sampling.admit(plan.admitted)
            self._inputs.apply_table_writes(plan)
            step = self.graphs.run(plan, self._sampling)
            return step if isinstance(step, GraphedStep) else LaunchedStep(step, ())
        launched = super()._launch(plan)
        self.graphs.capture_after(plan)
        return launched


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
    table = torch.zeros((4, 6), dtype=torch.int32)
    last = torch.tensor([10, 11, 12, 13])
    kernels = TorchStepKernels(table, last)
    rows = StepRows.allocate(3, CPU)
    host_rows = torch.tensor([[2, 0, 3], [5, 1, 0], [-1, 7, 0], [21, 9, 0]], dtype=torch.int32)
    kernels.begin(host_rows, rows)
    assert rows.input_ids.tolist() == [12, 7, 0]
    assert rows.positions.tolist() == rows.prefix_lens.tolist() == [4, 0, 0]
    assert table[2, 4] == 21
    assert table[0, 0] == 9
    logits = torch.tensor([[0.0, 3.0, 3.0], [float("nan"), 1.0, 2.0], [5.0, 1.0, 0.0]])
    sampled = torch.zeros(3, dtype=torch.int32)
    kernels.end(logits, rows.slots, sampled)
    assert sampled.tolist() == [1, NAN_TOKEN, 0]
    assert last.tolist() == [0, 11, 1, 0]
