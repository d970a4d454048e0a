"""Steps on a CUDA device: launched by the engine's own thread, awaited by an event.

The stream keeps the order of steps; while the device runs one, the host schedules and launches the
next. Knows no model: what a launch does is the runner's.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from workers.constraints.masks import StepMasks
from workers.engine.observer import AttentionRecord, ExpertRecord
from workers.runner.executor import PendingStep, StepOutcome
from workers.runner.mask_inbox import MaskInbox
from workers.runner.step_pieces import ReadableStep
from workers.scheduler.plan import StepPlan, StepResult

NEVER_SUBMITTED_S = float("-inf")


class DeviceEvent(Protocol):
    """A point on the device's stream. torch.cuda.Event is one. elapsed_time: milliseconds."""

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float: ...


@dataclass(frozen=True, slots=True)
class StepEvents:
    """The device's clock around one step.

    submitted_s: time.perf_counter() when the host had handed the device the graph that a step is,
    but for what stands behind it: it cannot have begun much earlier. NEVER_SUBMITTED_S for a step
    whose kernels start one by one.
    """

    start: DeviceEvent
    end: DeviceEvent
    submitted_s: float = NEVER_SUBMITTED_S


class DeviceClock:
    """Places steps on time.perf_counter's axis by the device's own clock.

    Steps follow each other by the events' distances, so that a gap between two steps is the
    device's own: it waited, or did what stands behind a step's samples. After a pause the host's
    clock is taken anew; it also bounds every end, which has passed when it is placed.
    """

    MAX_GAP_S = 0.1

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self._last_end: DeviceEvent | None = None
        self._last_end_s = 0.0

    def place(self, events: StepEvents, seen_s: float) -> tuple[float, float]:
        """(started_s, finished_s) of a step that the device has passed, as the host saw at seen_s.
        Steps come in order."""
        duration_s = events.start.elapsed_time(events.end) / 1e3
        finished_s = seen_s
        if self._last_end is not None:
            gap_s = self._last_end.elapsed_time(events.start) / 1e3
            if gap_s < self.MAX_GAP_S:
                finished_s = min(finished_s, self._last_end_s + gap_s + duration_s)
        self._last_end = events.end
        self._last_end_s = finished_s
        started_s = max(finished_s - duration_s, min(events.submitted_s, finished_s))
        return started_s, finished_s


class CudaPendingStep:
    """A step on the device. outcome() waits for its last copy and frees the interpreter while."""

    def __init__(
        self,
        step: ReadableStep,
        events: StepEvents,
        clock: DeviceClock,
        drain_attention: Callable[[], tuple[AttentionRecord, ...]],
        read_experts: Callable[[], ExpertRecord] | None = None,
    ) -> None:
        self._read_experts = read_experts
        self._step = step
        self._events = events
        self._clock = clock
        self._drain_attention = drain_attention
        self._seen: tuple[float, StepResult] | None = None

    def result(self) -> StepResult:
        return self._await()[1]

    def outcome(self) -> StepOutcome:
        seen_s, result = self._await()
        started_s, finished_s = self._clock.place(self._events, seen_s)
        experts = None if self._read_experts is None else self._read_experts()
        attention = self._drain_attention()
        return StepOutcome(result, started_s, finished_s, attention, experts=experts)

    def _await(self) -> tuple[float, StepResult]:
        """When the step's end was seen, and what it brought."""
        if self._seen is None:
            self._events.end.synchronize()
            seen_s = self._clock.now()
            self._seen = seen_s, self._step.read()
        return self._seen


class HalfLaunchedStep:
    """A step whose forward pass is on the device and whose samples are launched with its masks."""

    def __init__(self, launch_samples: Callable[[], PendingStep]) -> None:
        self._launch_samples = launch_samples
        self._whole: PendingStep | None = None

    def go_on(self) -> None:
        """The masks are there, or nobody wants the step any more."""
        self._whole = self._launch_samples()

    def result(self) -> StepResult:
        """As outcome."""
        return self._launched().result()

    def outcome(self) -> StepOutcome:
        """Raises RuntimeError before go_on: it would wait for ever."""
        return self._launched().outcome()

    def _launched(self) -> PendingStep:
        if self._whole is None:
            raise RuntimeError("a step was awaited before its masks were provided")
        return self._whole


class CudaStepExecutor:
    """Launches in the caller: a launch never waits for the device. One plan at a time waits for
    masks, and no other is launched before they are there."""

    def __init__(
        self,
        launch: Callable[[StepPlan], PendingStep],
        masks: MaskInbox,
        prepare: Callable[[], bool],
        close: Callable[[], None],
    ) -> None:
        self._launch = launch
        self._masks = masks
        self._prepare = prepare
        self._close = close
        self._half: HalfLaunchedStep | None = None

    def launch(self, plan: StepPlan) -> PendingStep:
        """Raises RuntimeError where the plan before still waits for masks."""
        if self._half is not None:
            raise RuntimeError("a step was launched before the masks of the last were provided")
        step = self._launch(plan)
        if isinstance(step, HalfLaunchedStep):
            self._half = step
        return step

    def named(self, plan: StepPlan) -> StepPlan:
        return plan

    def provide(self, masks: StepMasks) -> None:
        self._masks.put(masks)
        self._go_on()

    def forget_masks(self) -> None:
        self._masks.close()
        self._go_on()

    def prepare_while_idle(self) -> bool:
        return self._prepare()

    def close(self) -> None:
        self._close()

    def _go_on(self) -> None:
        half, self._half = self._half, None
        if half is not None:
            half.go_on()
