"""How long a step waits for the masks of its rows: while the device computes it anyway, and for as
long as the rows that are late would lose.

Rows without a grammar share the step. What it takes is known from the steps before, and so is what
the host needs from the masks to the launch of the step behind: to wake up, launch the samples, look
ahead, hand the outputs over, schedule. What is left of the step costs nothing.
"""

import time
from collections import deque
from collections.abc import Callable, Collection
from statistics import median

from workers.constraints.mask_deadline import NEVER, MaskDeadline
from workers.engine.clock import NUM_REMEMBERED_STEPS
from workers.runner.executor import StepOutcome
from workers.scheduler.plan import StepPlan

MIN_SHARE, MAX_SHARE = 0.25, 0.9
"""Of the step, whatever the host needs: where that takes longer than the device, nobody gains by
masks that are all late; and what the host needs is known of steps before only."""
UNMEASURED_SHARE = 0.5
MIN_PATIENCE_S = 0.001
"""For devices so quick that the commit of the step before takes as long as a step."""


class MaskPatience:
    """Is told of steps that wait for masks, and of those beside them alone.

    durations_s: of the last decode steps, whoever keeps them. now: on the axis of steps' outcomes.
    """

    def __init__(
        self, durations_s: Collection[float], now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._now = now
        # The shortest counts: a step that did wait for masks took longer by that.
        self._durations_s = durations_s
        # Half of them count: rows that run again make launches longer, and were patience cut by the
        # longest, more rows would run again.
        self._launches_s: deque[float] = deque(maxlen=NUM_REMEMBERED_STEPS)
        self._masks_came_s: float | None = None
        self._begun_s = 0.0

    def on_masks(self, until_s: float) -> None:
        """The step under way waits no longer, as its masks are there or it is until_s. How much
        later than that the host was woken is part of what it needs."""
        self._masks_came_s = min(self._now(), until_s)

    def on_launch(self, plan: StepPlan) -> None:
        """A step begins now, if the one before has finished."""
        self._begun_s = self._now()
        if self._masks_came_s is not None and plan.is_decode:
            self._launches_s.append(self._begun_s - self._masks_came_s)
        self._masks_came_s = None

    def on_finish(self, outcome: StepOutcome) -> None:
        """The step behind this one has begun, if it was launched before; else none is."""
        self._masks_came_s = None
        self._begun_s = max(self._begun_s, outcome.finished_s)

    def deadline(self, plan: StepPlan) -> MaskDeadline:
        """Of the masks of the step under way, which is plan's."""
        if not self._durations_s:
            return NEVER
        duration_s = min(self._durations_s)
        free_until_s = self._begun_s + self._free_share() * duration_s
        free_until_s = max(free_until_s, self._now() + MIN_PATIENCE_S)
        return MaskDeadline(free_until_s, duration_s / max(len(plan.slots), 1))

    def _free_share(self) -> float:
        duration_s = min(self._durations_s)
        if not self._launches_s or not duration_s:
            return UNMEASURED_SHARE
        return min(max(1.0 - median(self._launches_s) / duration_s, MIN_SHARE), MAX_SHARE)
