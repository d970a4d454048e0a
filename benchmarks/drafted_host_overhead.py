"""Host time of a step that verifies drafts of its rank: what the device waits for, and the rest.

    python -m benchmarks.drafted_host_overhead [--device-us N] [--steps N]

As host_overhead.py: engine, scheduler, executor, and all that a rank's host does around its graphs
are real, the device is a clock. A step is launched behind the samples of the one before; prints
microseconds a step, by part:

    samples to launch   from the samples being there until the runner is told to launch the plan
    launch to replay    from there until a graph is replayed, the next thing for the device to do
    behind it           what is left of the launch
    all of it           a step's host time, but for what it waits

One of several ranks has its drafts made behind the samples: the device waits for the first two
parts. Of one rank alone they have been made ahead by then, or are being made: it waits for what
these parts take longer than that. Floor: 0. Goal: the first two under 300 us together: an EAGLE
head on Llama-3.1-8B drafts for 750 us on an H200. What CUDA takes for copies, launches and events
is not in it.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest import mock

import numpy as np
import torch

from attention.backends.base import GraphAttentionBackend
from attention.forward_batch import ForwardBatch, StepShape
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from benchmarks.host_overhead import (
    CPU,
    MAX_CONTEXT_LEN,
    MAX_REQUESTS,
    PAGE_SIZE,
    VOCAB_SIZE,
    StubBackend,
    StubKernels,
    StubPool,
    decode_all,
    scheduler_config,
)
from workers.engine.engine import Engine
from workers.engine.protocol import ModelInfo
from workers.graphs.capture_attempts import CaptureAttempts
from workers.graphs.decode_graphs import Replay, RunStep
from workers.graphs.draft_graphs import DraftGraphs
from workers.graphs.draft_rows import RowKernels
from workers.graphs.graphed_model import GraphedModel
from workers.graphs.ring import StagingRing
from workers.graphs.tree_draft_graphs import TreeDraftGraphs
from workers.graphs.verify_graphs import MAX_TREE_TOKENS, verify_shapes
from workers.runner.cuda_executor import DeviceClock
from workers.runner.cuda_rank_drafts_runner import CudaRankDraftsRunner
from workers.runner.cuda_rank_trees_runner import CudaRankTreesRunner
from workers.runner.mask_inbox import MaskInbox
from workers.runner.step_inputs import StepInputBuilder
from workers.runner.step_pieces import ReadableStep
from workers.sampling.state import SamplingState
from workers.scheduler.plan import StepPlan, StepResult
from workers.scheduler.scheduler import MAX_UNCOMMITTED_PLANS, Scheduler
from workers.speculation.device_drafter import DeviceDrafter
from workers.speculation.device_step import DeviceDrafts, RunRows
from workers.speculation.draft_mailbox import DraftMailbox, Passed, PassedAtOnce
from workers.speculation.step_trees import LinedUp, StepTrees
from workers.speculation.tree_kernels import TORCH_TREE_KERNELS
from workers.speculation.tree_shape import level_parents

NUM_REQUESTS = (1, 8, 64)
NUM_DRAFTS = 3
TREE = (4, 4, 4, 4)
WRONG_DRAFT = 2
"""Of a row's drafts, counted from 0: those before it are right."""
PARTS = ("samples to launch", "launch to replay", "behind it", "all of it")


class _Readings:
    """When things happened in the step under way, on time.perf_counter's axis, and the parts of the
    steps before. waited_s: in the step under way, for the device."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {part: [] for part in PARTS}
        self.samples_s = self.launch_s = self.replay_s = self.end_s = self.waited_s = 0.0

    def take(self, step_s: float) -> None:
        own = (
            self.launch_s - self.samples_s,
            self.replay_s - self.launch_s,
            self.end_s - self.replay_s,
            step_s - self.waited_s,
        )
        for part, seconds in zip(PARTS, own, strict=True):
            self.parts[part].append(seconds)
        self.waited_s = 0.0

    def on_launch(self) -> None:
        self.launch_s, self.replay_s = time.perf_counter(), 0.0

    def on_replay(self) -> None:
        """Of a launch, the first one counts."""
        self.replay_s = self.replay_s or time.perf_counter()


class _Event:
    """A point on the device's stream, which lies device_s behind its record."""

    def __init__(self, readings: _Readings, device_s: float) -> None:
        self._readings = readings
        self._device_s = device_s
        self._passed_s = 0.0

    def record(self) -> None:
        self._passed_s = time.perf_counter() + self._device_s

    def synchronize(self) -> None:
        begun_s = time.perf_counter()
        if self._passed_s > begun_s:
            time.sleep(self._passed_s - begun_s)
        self._readings.samples_s = time.perf_counter()
        self._readings.waited_s += self._readings.samples_s - begun_s

    def elapsed_time(self, end_event: "_Event") -> float:
        return (end_event._passed_s - self._passed_s) * 1e3


class _Capturer:
    """Records nothing; a replay calls replayed."""

    def __init__(self, replayed: Replay) -> None:
        self._replayed = replayed

    def capture(self, run: RunStep) -> tuple[Replay, torch.Tensor]:
        return self._replayed, torch.zeros(1, VOCAB_SIZE)


class _Drafter:
    """As an EAGLE head, but that nothing is computed."""

    backend = StubBackend()
    first_position = 1
    carried_size = 0
    reads_last = True
    reads_target = True

    def behind(self, step: object, taps: Sequence[torch.Tensor]) -> None:
        """The device is pretended."""


class _Backend(StubBackend):
    config = SimpleNamespace(device=CPU, dtype=torch.float32, max_context_len=MAX_CONTEXT_LEN)

    def __init__(self, table: ReqToTokenPool) -> None:
        self.req_to_token_pool = table

    def record_step_tables(self, forward_batch: ForwardBatch) -> None:
        """Nothing is captured."""


def _no_launch(*tensors: object) -> None:
    """The device is pretended."""


class PretendedRank(CudaRankDraftsRunner):
    """A rank around graphs that answer at once. Prompts cost nothing."""

    num_drafts: ClassVar[int] = NUM_DRAFTS

    def __init__(self, readings: _Readings, is_alone: bool) -> None:
        """Of the runner's own only what its launches touch: there are no model and no pools."""
        self._readings = readings
        table = ReqToTokenPool(MAX_REQUESTS + 1, MAX_CONTEXT_LEN, CPU)
        self._device, self._req_to_token = CPU, table.req_to_token
        self._inputs = StepInputBuilder(table, cast(TokenToKVPool, StubPool()), CPU)
        self._sampling = SamplingState(MAX_REQUESTS + 1, VOCAB_SIZE, (), CPU)
        self._encoders = self._media = self._states = ()
        self._is_alone, self._expert_loads, self._segments = is_alone, None, None
        self._captures = CaptureAttempts(True, lambda: None)
        self._clock = DeviceClock(time.perf_counter)
        self._masks = MaskInbox()
        self._timer = cast(Any, SimpleNamespace(drain=list))
        self._graphs = None
        self._mailbox = DraftMailbox(self._new_mark)
        self._device_drafter = cast(DeviceDrafter, _Drafter())
        backend = cast(GraphAttentionBackend, _Backend(table))
        shapes = verify_shapes(MAX_REQUESTS, [1 + self.num_drafts], MAX_TREE_TOKENS)
        max_tokens = shapes[0].rows * shapes[0].tokens_per_row
        staging = StagingRing.on_host(max_tokens, MAX_UNCOMMITTED_PLANS, 1)
        ring = staging.ring
        asked = ring.rows[:, ring.num_fields, 0].numpy()
        answered = ring.sampled[:, -1].numpy()

        def verify() -> None:
            readings.on_replay()
            np.copyto(answered, asked)

        self._verify_graphs = self._verify_class(
            cast(GraphedModel, SimpleNamespace()),
            backend,
            StubKernels(),
            _Capturer(verify),
            staging,
            shapes,
            MAX_REQUESTS,
        )
        self._draft_graphs = self._pretended_drafts(backend, shapes)
        while self._capture_next():
            pass

    def _pretended_drafts(
        self, backend: GraphAttentionBackend, shapes: Sequence[StepShape]
    ) -> DraftGraphs:
        """Samples are zeros, and so are all drafts but one."""
        capturer, kernels = _Capturer(self._readings.on_replay), RowKernels(_no_launch, _no_launch)
        own = self._device_drafter, backend, capturer, shapes, MAX_REQUESTS, kernels
        graphs = DraftGraphs(*own)
        graphs.drafts[:, WRONG_DRAFT] = 1
        return graphs

    def launch(self, plan: StepPlan) -> Any:
        self._readings.on_launch()
        step = super().launch(plan)
        self._readings.end_s = time.perf_counter()
        return step

    def _new_mark(self) -> Passed:
        return PassedAtOnce()

    def _clear_tokens(self, cache_indices: object) -> None:
        """There are no pools."""

    def _launch(self, plan: StepPlan) -> ReadableStep:
        """Of a step with prompts."""
        runs = RunRows.of(plan)
        if len(runs):
            token_ids = torch.zeros(len(runs), runs.width, dtype=torch.int64)
            sent = self._mailbox.send(DeviceDrafts(token_ids))
            self._mailbox.put(plan.step_id, runs.slots, sent)
        self._mailbox.end(plan.step_id)
        return _Zeros(plan)

    def close(self) -> None:
        """Nothing runs."""


def _held(
    trees: StepTrees, sampled: torch.Tensor, ids: torch.Tensor, cache_indices: torch.Tensor
) -> LinedUp:
    """The device is pretended."""
    return LinedUp(sampled, cache_indices, sampled)


class PretendedTrees(PretendedRank, CudaRankTreesRunner):
    """The same of trees, of which a path of WRONG_DRAFT drafts holds."""

    num_drafts = sum(TREE)
    _tree = TREE

    def __init__(self, readings: _Readings, is_alone: bool) -> None:
        super().__init__(readings, is_alone)
        self._token_to_kv_pool = cast(TokenToKVPool, SimpleNamespace(line_up=_no_launch))
        self._device_drafter.line_up = _no_launch
        self._tree_kernels = TORCH_TREE_KERNELS._replace(hold=_held)

    def _pretended_drafts(
        self, backend: GraphAttentionBackend, shapes: Sequence[StepShape]
    ) -> DraftGraphs:
        capturer, kernels = _Capturer(self._readings.on_replay), RowKernels(_no_launch, _no_launch)
        own = self._device_drafter, backend, capturer, shapes, MAX_REQUESTS, kernels
        graphs = TreeDraftGraphs(*own, TREE)
        # Samples are zeros, and so is the first draft of each depth before the wrong one.
        in_level = [
            rank + (depth >= WRONG_DRAFT) for depth, n in enumerate(TREE) for rank in range(n)
        ]
        graphs.drafts[:, : self.num_drafts] = torch.tensor(in_level)
        graphs._parents[:, : self.num_drafts] = torch.tensor(level_parents(TREE))
        return graphs


@dataclass(frozen=True, slots=True)
class _Zeros:
    plan: StepPlan

    def read(self) -> StepResult:
        samples = self.plan.samples
        unfinished = (False,) * int((samples == 0).sum())
        token_ids = np.zeros(int(samples.sum()), dtype=np.int32)
        return StepResult(token_ids, chunk_has_nan=unfinished)


def measure(
    num_requests: int,
    num_steps: int,
    device_s: float,
    is_alone: bool,
    rank_class: type[PretendedRank] = PretendedRank,
) -> dict[str, list[float]]:
    """Seconds of each of num_steps steps, by part, of num_requests requests that all decode.
    is_alone: on one rank."""
    readings = _Readings()

    def new_event(enable_timing: bool) -> _Event:
        return _Event(readings, device_s)

    with mock.patch.object(torch.cuda, "Event", new_event):
        return _measure(readings, rank_class(readings, is_alone), num_requests, num_steps)


def _measure(
    readings: _Readings, runner: PretendedRank, num_requests: int, num_steps: int
) -> dict[str, list[float]]:
    config = replace(scheduler_config(), max_draft_tokens=runner.num_drafts)
    info = ModelInfo(
        "stub", VOCAB_SIZE, MAX_CONTEXT_LEN, (), "none", PAGE_SIZE, 1, 1, "none", MAX_CONTEXT_LEN
    )
    engine = Engine(info, Scheduler(config), runner.with_drafts(runner.make_executor()))
    decode_all(engine, num_requests, (num_steps + 64) * (1 + NUM_DRAFTS))
    readings.parts = {part: [] for part in PARTS}
    readings.waited_s = 0.0
    for _ in range(num_steps):
        begun_s = time.perf_counter()
        num_outputs = len(engine.step())
        readings.take(time.perf_counter() - begun_s)
        if num_outputs != num_requests:
            raise RuntimeError(f"{num_outputs} of {num_requests} requests had a part in a step")
    engine.close()
    return readings.parts


def line_of(num_requests: int, parts: dict[str, list[float]]) -> str:
    """p50 / p99 of each part, microseconds."""
    cells = [str(num_requests)]
    for part in PARTS:
        p50, p99 = np.percentile(parts[part], [50, 99]) * 1e6
        cells.append(f"{p50:.0f} / {p99:.0f}")
    return "".join(f"{cell:>20}" for cell in cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="steps measured a row")
    parser.add_argument("--device-us", type=float, default=0.0, help="device time of a step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kinds = {
        f"chains of {NUM_DRAFTS} drafts on one rank alone": (True, PretendedRank),
        f"chains of {NUM_DRAFTS} drafts on one of several ranks": (False, PretendedRank),
        f"trees of {sum(TREE)} drafts on one rank alone": (True, PretendedTrees),
    }
    for name, kind in kinds.items():
        print(f"microseconds a step with {name}, p50 / p99")
        print("".join(f"{head:>20}" for head in ("requests", *PARTS)))
        for num in NUM_REQUESTS:
            own = arguments.steps, arguments.device_us / 1e6, *kind
            print(line_of(num, measure(num, *own)))


if __name__ == "__main__":
    main()
