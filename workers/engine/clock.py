"""From step outcomes to step records: durations, and the gaps in which the device waited."""

from collections import deque

from attention.timing import phase_of
from workers.engine.observer import OnStep, StepRecord
from workers.runner.executor import StepOutcome
from workers.scheduler.plan import StepPlan

NUM_REMEMBERED_STEPS = 16


class StepClock:
    """Turns outcomes into StepRecords for on_step.

    A gap counts as the host's only between steps that were back to back: the next one was
    launched while the engine still had the previous one to commit, or right after it.
    decode_durations_s: of the last decode steps.
    """

    def __init__(self, on_step: OnStep, max_gap_s: float = 0.1) -> None:
        self._on_step = on_step
        self._max_gap_s = max_gap_s
        self._last_step_id = -1
        self._last_finished_s = 0.0
        self.decode_durations_s: deque[float] = deque(maxlen=NUM_REMEMBERED_STEPS)

    def place(self, plan: StepPlan, outcome: StepOutcome) -> float:
        """Returns the step's host_gap_s."""
        gap_s = outcome.started_s - self._last_finished_s
        is_back_to_back = plan.step_id == self._last_step_id + 1 and gap_s <= self._max_gap_s
        self._last_step_id = plan.step_id
        self._last_finished_s = outcome.finished_s
        host_gap_s = max(0.0, gap_s) if is_back_to_back else 0.0
        step_s = outcome.finished_s - outcome.started_s
        if plan.is_decode:
            self.decode_durations_s.append(step_s)
        self._on_step(
            StepRecord(
                phase=phase_of(plan.mode).value,
                step_s=step_s,
                host_gap_s=host_gap_s,
                batch_size=plan.batch_size,
                num_prefill_tokens=plan.num_tokens - plan.num_decode_tokens,
                attention=outcome.attention,
                draft_s=outcome.draft_s,
                experts=outcome.experts,
            )
        )
        return host_gap_s
