"""How long a step waits for the masks of its rows: while the device computes it anyway.

Rows without a grammar share the step. What it takes is known from the steps before; the share of it
that is waited leaves the host time to launch the samples and the next step behind them.
"""

import time
from collections import deque
from collections.abc import Callable

from workers.runner.executor import StepOutcome
from workers.scheduler.plan import StepPlan

PATIENT_SHARE = 0.75
MIN_PATIENCE_S = 0.001
"""For devices so quick that the commit of the step before takes as long as a step."""
NUM_REMEMBERED_STEPS = 16


class MaskPatience:
    """now: on the axis of steps' outcomes."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        # The shortest counts: a step that did wait for masks took longer by that.
        self._durations_s: deque[float] = deque(maxlen=NUM_REMEMBERED_STEPS)
        self._begun_s = 0.0

    def on_launch(self) -> None:
        """A step begins now, if the one before has finished."""
        self._begun_s = self._now()

    def on_finish(self, plan: StepPlan, outcome: StepOutcome) -> None:
        """The step behind this one has begun, if it was launched before."""
        self._begun_s = max(self._begun_s, outcome.finished_s)
        if plan.is_decode:
            self._durations_s.append(outcome.finished_s - outcome.started_s)

    def until_s(self) -> float:
        """When the masks of the step under way should be there."""
        if not self._durations_s:
            return float("inf")
        begun_s = self._begun_s + PATIENT_SHARE * min(self._durations_s)
        return max(begun_s, self._now() + MIN_PATIENCE_S)
