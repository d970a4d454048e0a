"""How a launched step runs beside the host: the overlap's seam.

ThreadStepExecutor runs steps on one thread of their own, in order: on CPU the engine's thread
schedules step N+1 while step N runs. Knows no request.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from attention.timing import AttentionTiming
from workers.constraints.masks import StepMasks
from workers.engine.observer import AttentionRecord, ExpertRecord
from workers.runner.mask_inbox import MaskInbox
from workers.scheduler.plan import StepPlan, StepResult


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """A finished step: its result and its clock readings on time.perf_counter's axis. draft_s: how
    long of that drafts were looked for, 0 where the step was to have none. experts: where they are
    read with this step."""

    result: StepResult
    started_s: float
    finished_s: float
    attention: tuple[AttentionRecord, ...]
    draft_s: float = 0.0
    experts: ExpertRecord | None = None


def attention_records(timings: Sequence[AttentionTiming]) -> tuple[AttentionRecord, ...]:
    return tuple(
        AttentionRecord(
            timing.phase.value, timing.backend, timing.seconds, timing.bytes_read, timing.flops
        )
        for timing in timings
    )


class PendingStep(Protocol):
    """A launched step. outcome() waits for it and raises what the step raised. Steps are asked for
    theirs in their order."""

    def result(self) -> StepResult:
        """What is a part of the outcome, for who must not wait until the rest is worked out."""
        ...

    def outcome(self) -> StepOutcome: ...


class StepExecutor(Protocol):
    """Runs plans strictly in launch order."""

    def launch(self, plan: StepPlan) -> PendingStep: ...

    def named(self, plan: StepPlan) -> StepPlan:
        """The plan that was launched last, as it runs: with its drafts named and its lengths true.
        Waits until they are, which the steps before may have to end for."""
        ...

    def provide(self, masks: StepMasks) -> None:
        """What a launched plan with masked_slots waits for."""
        ...

    def forget_masks(self) -> None:
        """Steps that wait for masks end without: nobody wants their results."""
        ...

    def prepare_while_idle(self) -> bool:
        """Do one piece of work, under a second, that will make later steps faster; whether there
        was any. Called by who launches, when no step is under way."""

    def close(self) -> None: ...


RunStep = Callable[[StepPlan], StepOutcome]


class FutureStep:
    """A step that a thread runs."""

    def __init__(self, future: Future[StepOutcome]) -> None:
        self._future = future

    def result(self) -> StepResult:
        return self.outcome().result

    def outcome(self) -> StepOutcome:
        return self._future.result()


class ThreadStepExecutor:
    """One worker thread, so steps never overlap each other, only the host."""

    def __init__(self, run_step: RunStep, masks: MaskInbox) -> None:
        self._run_step = run_step
        self._masks = masks
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tessera-step")

    def launch(self, plan: StepPlan) -> PendingStep:
        return FutureStep(self._pool.submit(self._run_step, plan))

    def named(self, plan: StepPlan) -> StepPlan:
        return plan

    def provide(self, masks: StepMasks) -> None:
        self._masks.put(masks)

    def forget_masks(self) -> None:
        self._masks.close()

    def prepare_while_idle(self) -> bool:
        return False

    def close(self) -> None:
        self._pool.shutdown(wait=True)
