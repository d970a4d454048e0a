"""A step waits for masks as long as its device goes on computing, by a clock that the test sets."""

from collections import deque

import msgspec
import numpy as np
import pytest

from workers.engine.clock import NUM_REMEMBERED_STEPS
from workers.engine.mask_patience import (
    MAX_SHARE,
    MIN_PATIENCE_S,
    MIN_SHARE,
    UNMEASURED_SHARE,
    MaskPatience,
)
from workers.runner.executor import StepOutcome
from workers.scheduler.plan import StepPlan, StepResult

FORWARD_S = 0.0053
NOTHING = np.empty(0, dtype=np.int32)
NO_RESULT = StepResult(NOTHING)


def plan(is_decode: bool = True) -> StepPlan:
    return StepPlan(
        step_id=0,
        is_decode=is_decode,
        slots=NOTHING,
        num_new_tokens=NOTHING,
        prefix_lens=NOTHING,
        samples=NOTHING,
        input_ids=NOTHING,
        out_cache_loc=NOTHING,
    )


class Device:
    """Overlapped steps whose masks are always late, on a clock that only the host's work moves.

    idle_s: for which the device waited for the host. oversleeps_s: how much later the host wakes up
    than it was to.
    """

    def __init__(self, forward_s: float) -> None:
        self.now_s = 100.0
        self._durations_s: deque[float] = deque(maxlen=NUM_REMEMBERED_STEPS)
        self.patience = MaskPatience(self._durations_s, lambda: self.now_s)
        self._forward_s = forward_s
        self._free_s = self._started_s = self.now_s
        self._is_launched = False
        self.idle_s = self.oversleeps_s = 0.0

    def step(self, host_s: float, is_decode: bool = True) -> float:
        """One turn of the engine, whose host takes host_s from the masks to the launch; returns for
        how long the step was waited, from its beginning."""
        self.now_s += host_s
        started_s = max(self.now_s, self._free_s)
        self.idle_s += started_s - self._free_s
        self.patience.on_launch(plan(is_decode))
        if self._is_launched:
            self.now_s = max(self.now_s, self._free_s)
            self._finish()
        self._is_launched, self._started_s = True, started_s
        until_s = self.patience.deadline(plan()).until_s(0)
        waits = until_s < float("inf")
        self.now_s = until_s + self.oversleeps_s if waits else started_s + self._forward_s
        self.patience.on_masks(until_s)
        # Samples are launched behind the forward pass, or when the masks are there.
        self._free_s = max(started_s + self._forward_s, self.now_s)
        return until_s - started_s

    def steps(self, num: int, host_s: float) -> float:
        """The last one's."""
        for _ in range(num):
            waited_s = self.step(host_s)
        return waited_s

    def pause(self, pause_s: float) -> None:
        """The last step is committed and nobody asks for anything."""
        self._finish()
        self.now_s = self._free_s + pause_s
        self._free_s = self.now_s
        self._is_launched = False

    def _finish(self) -> None:
        self._durations_s.append(self._free_s - self._started_s)
        self.patience.on_finish(StepOutcome(NO_RESULT, self._started_s, self._free_s, ()))


@pytest.mark.parametrize("host_s", [0.0008, 0.002, 0.0035])
def test_late_masks_keep_no_device_waiting_whatever_its_host_needs(host_s: float) -> None:
    device = Device(FORWARD_S)
    device.steps(NUM_REMEMBERED_STEPS, host_s)
    device.idle_s = 0.0
    assert device.steps(50, host_s) == pytest.approx(FORWARD_S - host_s)
    assert device.idle_s == pytest.approx(0.0, abs=1e-9)


def test_a_host_that_wakes_up_late_is_to_wake_up_sooner() -> None:
    device = Device(FORWARD_S)
    device.oversleeps_s = 0.0013
    device.steps(NUM_REMEMBERED_STEPS, 0.002)
    device.idle_s = 0.0
    assert device.steps(50, 0.002) == pytest.approx(FORWARD_S - 0.0033)
    assert device.idle_s == pytest.approx(0.0, abs=1e-9)


def test_half_of_the_last_launches_say_how_long_the_next_one_takes() -> None:
    device = Device(FORWARD_S)
    device.steps(30, 0.001)
    device.steps(NUM_REMEMBERED_STEPS // 2 - 1, 0.003)
    assert device.step(0.001) == pytest.approx(FORWARD_S - 0.001)
    device.steps(NUM_REMEMBERED_STEPS // 2, 0.003)
    assert device.step(0.001) == pytest.approx(FORWARD_S - 0.003)


def test_rows_that_wait_are_waited_for_as_long_as_they_would_lose() -> None:
    device = Device(FORWARD_S)
    device.steps(30, 0.001)
    rows = np.zeros(8, dtype=np.int32)
    deadline = device.patience.deadline(msgspec.structs.replace(plan(), slots=rows))
    extra_s = deadline.until_s(4) - deadline.until_s(0)
    assert extra_s == pytest.approx(FORWARD_S / 2)


def test_one_pause_of_the_host_and_the_launch_of_a_prompt_say_nothing_of_the_next_step() -> None:
    device = Device(FORWARD_S)
    device.steps(30, 0.001)
    device.step(0.04)
    assert device.step(0.001) == pytest.approx(FORWARD_S - 0.001)
    for _ in range(3):
        device.step(0.004, is_decode=False)
    assert device.step(0.001) == pytest.approx(FORWARD_S - 0.001)


def test_what_the_host_was_idle_for_is_no_launch() -> None:
    device = Device(FORWARD_S)
    device.steps(30, 0.001)
    for _ in range(3):
        device.pause(2.0)
        device.steps(2, 0.001)
    assert device.step(0.001) == pytest.approx(FORWARD_S - 0.001)


@pytest.mark.parametrize(("host_s", "share"), [(0.02, MIN_SHARE), (0.0001, MAX_SHARE)])
def test_shares_have_bounds(host_s: float, share: float) -> None:
    device = Device(FORWARD_S)
    device.steps(40, host_s)
    waited_s = device.patience._free_share() * FORWARD_S
    assert waited_s == pytest.approx(share * FORWARD_S)


def test_steps_are_waited_for_before_anything_is_known() -> None:
    device = Device(FORWARD_S)
    assert device.step(0.001) == float("inf")
    patience = MaskPatience([FORWARD_S], lambda: 50.0)
    patience.on_finish(StepOutcome(NO_RESULT, 49.0, 49.0 + FORWARD_S, ()))
    patience.on_launch(plan())
    assert patience.deadline(plan()).until_s(0) == pytest.approx(
        50.0 + UNMEASURED_SHARE * FORWARD_S
    )


def test_a_device_that_is_quicker_than_the_host_still_waits_a_little() -> None:
    device = Device(0.0005)
    device.steps(20, 0.002)
    assert device.patience.deadline(plan()).until_s(0) >= device.now_s + MIN_PATIENCE_S
