"""Host time of a decode step: the real engine and scheduler over a device that is only pretended.

    python -m benchmarks.host_overhead [--device-us N] [--steps N]

Runs anywhere. Below the executor everything that the host does for a graphed step is real (rows
staged, admissions, sampling's choice of path, the result read), the device is a clock: a step's
tokens are there so many microseconds after the one before. Prints microseconds a step by part.
Floor: 0. Goal: hidden behind the device, so below its step (4 ms for 8B shapes on an H200); the
design's bar is under 1,000 us at 256 requests. What CUDA itself takes for a launch is not in it.
"""

import argparse
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch

from attention.backends.base import GraphAttentionBackend
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from benchmarks.pretended_steps import result_of
from service.channel.messages import StepFrame, encode
from workers.constraints.masks import StepMasks
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest, ModelInfo
from workers.graphs.decode_graphs import (
    AttentionTwins,
    DecodeGraphs,
    GraphedStep,
    batch_size_ladder,
)
from workers.graphs.decode_step import StepRing, StepRows, TokenRows
from workers.graphs.measured_turns import MeasuredTurns
from workers.graphs.ring import StagingRing
from workers.models.base import CausalLM
from workers.runner.executor import PendingStep, StepExecutor, StepOutcome
from workers.runner.step_inputs import StepInputBuilder
from workers.sampling.params import SamplingParams
from workers.sampling.state import SamplingState
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.plan import StepPlan, StepResult
from workers.scheduler.scheduler import MAX_UNCOMMITTED_PLANS, Scheduler

VOCAB_SIZE = 1024
PAGE_SIZE = 128
PROMPT_TOKENS = 256
MAX_CONTEXT_LEN = 4096
MAX_REQUESTS = 256
NUM_REQUESTS = (1, 64, 256)
PARTS = ("schedule", "launch", "commit", "output")
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class _StubConfig:
    device: torch.device = CPU


class StubBackend:
    """What DecodeGraphs asks of a backend when nothing is captured."""

    config: Any = _StubConfig()
    req_to_token_pool = ReqToTokenPool(1, 1, CPU)

    def init_cuda_graph_state(self, max_bs: int) -> None:
        """No buffers."""

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: object) -> None:
        """No metadata."""

    def before_replay(self, num_rows: int, seq_lens_cpu: object) -> None:
        """Nothing is planned on the host, as for most backends."""

    def fuses_decode_projection(self, num_rows: int) -> bool:
        return False

    def graph_backends(self, num_rows: int) -> tuple["StubBackend", ...]:
        return (self,)

    def graph_backend_of(self, num_rows: int, seq_lens: object) -> "StubBackend":
        return self


class StubKernels:
    """Launches nothing."""

    def begin(self, ring: StepRing, rows: StepRows) -> None:
        """The device is pretended."""

    def gather_rows(self, tokens: StepRows, named: torch.Tensor | None, rows: TokenRows) -> None:
        """The device is pretended."""

    def mark_ancestors(self, parents: torch.Tensor, num_tokens: int, cells: torch.Tensor) -> None:
        """The device is pretended."""

    def end(self, logits: torch.Tensor, slots: torch.Tensor, ring: StepRing) -> None:
        """The device is pretended."""


class _StubCapturer:
    """Records nothing; a replay answers the next step of the ring with zeros."""

    def __init__(self, ring: StepRing) -> None:
        self._asked = ring.rows[:, ring.num_fields, 0].numpy()
        self._answered = ring.sampled[:, -1].numpy()

    def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        return self._answer, torch.zeros(1, VOCAB_SIZE)

    def _answer(self) -> None:
        self._answered[:] = self._asked


class PretendedDevice:
    """Finishes each step device_s after it was launched or after the one before, in order."""

    def __init__(self, device_s: float) -> None:
        self._device_s = device_s
        self.free_at_s = 0.0

    def start_step(self) -> float:
        """When the step now launched will have ended, on time.perf_counter's axis."""
        self.free_at_s = max(self.free_at_s, time.perf_counter()) + self._device_s
        return self.free_at_s


@dataclass(frozen=True, slots=True)
class _PretendedStep:
    """A launched step: read makes its result."""

    read: Callable[[], StepResult]
    started_s: float
    ended_s: float

    def result(self) -> StepResult:
        return self.outcome().result

    def outcome(self) -> StepOutcome:
        remaining_s = self.ended_s - time.perf_counter()
        if remaining_s > 0.0:
            time.sleep(remaining_s)
        return StepOutcome(self.read(), self.started_s, self.ended_s, ())


class StubPool:
    """Clearing tokens is all that the builder does to a pool."""

    page_size = PAGE_SIZE

    def clear_tokens(self, *indices: torch.Tensor) -> None:
        """There are none."""


class StubExecutor(StepExecutor):
    """The host's side of graphed steps over a pretended device. Prefills cost nothing."""

    def __init__(self, device: PretendedDevice) -> None:
        num_slots = MAX_REQUESTS + 1
        self._device = device
        table = ReqToTokenPool(num_slots, MAX_CONTEXT_LEN, CPU)
        self._inputs = StepInputBuilder(table, cast(TokenToKVPool, StubPool()), CPU)
        self._sampling = SamplingState(num_slots, VOCAB_SIZE, (), CPU)
        sizes = batch_size_ladder(MAX_REQUESTS)
        staging = StagingRing.on_host(sizes[-1], MAX_UNCOMMITTED_PLANS, 1)
        self._graphs = DecodeGraphs(
            cast(CausalLM, SimpleNamespace(state_entries=())),
            cast(GraphAttentionBackend, StubBackend()),
            StubKernels(),
            _StubCapturer(staging.ring),
            staging,
            sizes,
            MAX_REQUESTS,
            AttentionTwins(MeasuredTurns(0), _no_timer),
        )
        for size in sizes:
            self._graphs.capture(size)

    def launch(self, plan: StepPlan) -> PendingStep:
        started_s = time.perf_counter()
        self._sampling.admit(plan.admitted)
        self._inputs.apply_memory_writes(plan)
        read = self._replay(plan) if self._graphs.covers(plan) else _zeros(plan)
        return _PretendedStep(read, started_s, self._device.start_step())

    def named(self, plan: StepPlan) -> StepPlan:
        return plan

    def provide(self, masks: StepMasks) -> None:
        raise NotImplementedError("requests of this benchmark have no grammars")

    def forget_masks(self) -> None:
        """There are none."""

    def prepare_while_idle(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to release."""

    def _replay(self, plan: StepPlan) -> Callable[[], StepResult]:
        step = self._graphs.run(plan, self._sampling)
        if not isinstance(step, GraphedStep):
            raise TypeError("this benchmark's requests are greedy")
        return step.read


def _no_timer(backend: GraphAttentionBackend) -> Any:
    raise RuntimeError("no replay is timed here")


def _zeros(plan: StepPlan) -> Callable[[], StepResult]:
    return lambda: result_of(plan, token_id=0)


def scheduler_config(
    vocab_size: int = VOCAB_SIZE, *, can_repeat_slots: bool = False
) -> SchedulerConfig:
    return SchedulerConfig(
        page_size=PAGE_SIZE,
        num_pages=1 + MAX_REQUESTS * MAX_CONTEXT_LEN // PAGE_SIZE,
        max_running_requests=MAX_REQUESTS,
        max_context_len=MAX_CONTEXT_LEN,
        max_step_tokens=8192,
        target_inter_token_s=None,
        max_waiting_requests=4096,
        max_waiting_tokens=1 << 22,
        enable_prefix_cache=True,
        enable_mixed_batches=True,
        eos_token_ids=(),
        vocab_size=vocab_size,
        seed=0,
        can_repeat_slots=can_repeat_slots,
        can_run_again=True,
    )


@dataclass(frozen=True, slots=True)
class HostTimes:
    """Seconds of each decode step, by part, and of whole steps."""

    num_requests: int
    parts: dict[str, list[float]]
    steps: list[float]

    def percentile_us(self, part: str, percent: float) -> float:
        return float(np.percentile(self.parts[part], percent)) * 1e6

    def host_us(self, percent: float) -> float:
        """All parts of a step together."""
        sums = np.sum([self.parts[part] for part in PARTS], axis=0)
        return float(np.percentile(sums, percent)) * 1e6

    @property
    def step_us(self) -> float:
        return float(np.median(self.steps)) * 1e6


class _Stopwatch:
    """Times calls of wrapped methods while it is on."""

    def __init__(self) -> None:
        self.parts: dict[str, list[float]] = {part: [] for part in PARTS}

    def timed(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            start_s = time.perf_counter()
            result = call(*arguments)
            self.parts[part].append(time.perf_counter() - start_s)
            return result

        return run


def measure(num_requests: int, num_steps: int, device_s: float) -> HostTimes:
    """Decode steps of num_requests requests that all run, after their prefill."""
    scheduler = Scheduler(scheduler_config())
    executor = StubExecutor(PretendedDevice(device_s))
    info = ModelInfo(
        "stub", VOCAB_SIZE, MAX_CONTEXT_LEN, (), "none", PAGE_SIZE, 1, 1, "none", MAX_CONTEXT_LEN
    )
    engine = Engine(info, scheduler, executor)
    decode_all(engine, num_requests, num_steps + 64)
    watch = _Stopwatch()
    scheduler.schedule = watch.timed("schedule", scheduler.schedule)  # type: ignore[method-assign]
    scheduler.commit = watch.timed("commit", scheduler.commit)  # type: ignore[method-assign]
    executor.launch = watch.timed("launch", executor.launch)  # type: ignore[method-assign]
    to_wire = watch.timed("output", lambda outputs: encode(StepFrame(outputs, {}, None)))
    steps = []
    for _ in range(num_steps):
        start_s = time.perf_counter()
        to_wire(engine.step())
        steps.append(time.perf_counter() - start_s)
    engine.close()
    return HostTimes(num_requests, watch.parts, steps)


def decode_all(engine: Engine, num_requests: int, max_tokens: int) -> None:
    """Greedy requests of so many tokens, until all have decoded some."""
    rng = random.Random(num_requests)
    greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for index in range(num_requests):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
        engine.submit(GenerateRequest(f"request-{index:08d}", prompt, greedy))
    while engine.stats().queued_tokens:
        engine.step()
    for _ in range(16):
        engine.step()


def table_of(rows: list[HostTimes]) -> str:
    """p50 / p99 of each part, microseconds."""
    heads = ("requests", *PARTS, "all of it", "step")
    lines = ["".join(f"{head:>15}" for head in heads)]
    for row in rows:
        cells = [
            f"{row.percentile_us(part, 50):.0f} / {row.percentile_us(part, 99):.0f}"
            for part in PARTS
        ]
        cells.append(f"{row.host_us(50):.0f} / {row.host_us(99):.0f}")
        cells.append(f"{row.step_us:.0f}")
        lines.append("".join(f"{cell:>15}" for cell in (str(row.num_requests), *cells)))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="decode steps measured a row")
    parser.add_argument("--device-us", type=float, default=0.0, help="device time of a step")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(num, arguments.steps, arguments.device_us / 1e6) for num in NUM_REQUESTS]
    print("microseconds a decode step, p50 / p99; step: median from one call to the next")
    print(table_of(rows))


if __name__ == "__main__":
    main()
