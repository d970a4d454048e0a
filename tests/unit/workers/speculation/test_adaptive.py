"""The length that pays is found, kept, and left when it no longer pays."""

import random

import numpy as np
import numpy.typing as npt
import pytest

from benchmarks.draft_lengths import (
    AHEAD,
    HEAD,
    LOOKED_UP,
    MAX_DRAFT_TOKENS,
    PretendedDevice,
    chance_of,
    falling_rows,
    shares,
    steps_taken,
)
from workers.speculation.adaptive import Acceptance, AdaptiveLength
from workers.speculation.policy import DecodeShape, FixedLength
from workers.speculation.step_seconds import StepSeconds

MOST = np.full(4, MAX_DRAFT_TOKENS, dtype=np.int32)


@pytest.mark.parametrize("device", [LOOKED_UP, HEAD, AHEAD], ids=["looked_up", "head", "ahead"])
@pytest.mark.parametrize("num_rows", [1, 64, 256])
@pytest.mark.parametrize(
    "acceptance_length", [1.0, pytest.param(2.0, marks=pytest.mark.nightly), 4.0]
)
def test_it_is_never_slower_than_plain_steps_nor_than_the_best_length(
    num_rows: int, acceptance_length: float, device: PretendedDevice
):
    """Though the first step of each shape takes a hundred times as long as the others."""
    of_best, of_plain = shares(AdaptiveLength, [num_rows] * 1000, acceptance_length, device)
    assert of_best >= 0.98
    assert of_plain >= 0.98
    if acceptance_length == 4.0 and num_rows < 256:
        assert of_plain > 1.3


@pytest.mark.parametrize("num_rows", [16, 64, 256])
@pytest.mark.parametrize("acceptance_length", [1.0, 3.0])
def test_streams_that_end_leave_numbers_of_rows_that_are_new(
    num_rows: int, acceptance_length: float
):
    rows = falling_rows(num_rows, 500)
    assert (rows[0], rows[499], rows[500], rows[-1]) == (num_rows, 1, num_rows, 1)
    of_best, of_plain = shares(AdaptiveLength, rows, acceptance_length, HEAD)
    assert of_best >= 0.95
    assert of_plain >= 0.98


def test_a_fixed_length_is_slower_where_nothing_is_right():
    _, of_plain = shares(FixedLength, [256] * 50, 1.0)
    assert of_plain < 0.3


def test_what_is_accepted_may_change_both_ways():
    policy, device = AdaptiveLength(MAX_DRAFT_TOKENS), PretendedDevice(first_s=0.0)
    lengths = []
    for acceptance_length in (1.0, 4.0, 1.0):
        for _ in steps_taken(policy, device, [16] * 800, chance_of(acceptance_length)):
            pass
        lengths.append([policy.choose(np.full(16, 8, dtype=np.int32)) for _ in range(20)])
    without, with_drafts, without_again = (float(np.median(own)) for own in lengths)
    assert (without, without_again) == (0, 0)
    assert with_drafts >= 6


def test_rows_that_may_have_none_count():
    """One row in thirty-two that may have drafts does not pay for a step of all."""
    most = np.zeros(32, dtype=np.int32)
    most[0] = 8
    policy = AdaptiveLength(8)
    for _ in range(300):
        num_drafts = policy.choose(most)
        if num_drafts:
            policy.observe_run(num_drafts, num_drafts)
        policy.observe_step(DecodeShape(32, num_drafts), 1e-3 * (1.0 + 0.1 * num_drafts))
    taken = []
    for _ in range(1000):
        taken.append(policy.choose(most))
        policy.observe_step(DecodeShape(32, taken[-1]), 1e-3 * (1.0 + 0.1 * taken[-1]))
    assert taken.count(0) > 960
    assert sum(taken) * 0.1 < 0.01 * len(taken)
    assert policy.choose(np.full(32, 8, dtype=np.int32)) > 0


@pytest.mark.parametrize("most_of_rows", [1, 2])
def test_lengths_that_no_row_may_have_are_not_tried(most_of_rows: int):
    """Their steps have fewer drafts: they would never be measured, and be tried over and over."""
    policy = AdaptiveLength(8)

    def run(num_steps: int, most_of_rows: int, num_right: int) -> list[int]:
        most, taken = np.full(4, most_of_rows, dtype=np.int32), []
        for _ in range(num_steps):
            num_drafts = min(policy.choose(most), most_of_rows)
            taken.append(num_drafts)
            for _ in most if num_drafts else ():
                policy.observe_run(num_drafts, min(num_right, num_drafts))
            policy.observe_step(DecodeShape(4, num_drafts), 1e-2 * (1.0 + 0.25 * num_drafts))
        return taken

    assert 0 < np.count_nonzero(run(1000, most_of_rows, num_right=0)) < 25
    # Where rows may have more and these are right, longer ones are found.
    assert np.mean(run(3000, 8, num_right=8)[-500:]) > 7


@pytest.mark.parametrize("draft_s", [0.05, 0.2])
def test_steps_that_may_have_no_drafts_do_not_stand_against_those_that_may(draft_s: float):
    """Requests that want none, or whose drafts were wrong for a while, and then others."""
    policy = AdaptiveLength(8)

    def run(num_steps: int, num_right: int) -> list[int]:
        taken = []
        for _ in range(num_steps):
            num_drafts = policy.choose(MOST)
            taken.append(num_drafts)
            for _ in MOST:
                if num_drafts:
                    policy.observe_run(num_drafts, min(num_right, num_drafts))
            policy.observe_step(DecodeShape(4, num_drafts), 1e-2 * (1.0 + draft_s * num_drafts))
        return taken

    assert np.mean(run(400, num_right=8)[200:]) > 6
    for _ in range(1000):
        policy.observe_step(DecodeShape(4, 0), 1e-2)
    assert np.mean(run(400, num_right=8)[:50]) > 6
    assert np.mean(run(400, num_right=0)[-100:]) < 0.5
    assert np.mean(run(3000, num_right=8)[-1000:]) > 6


def test_no_drafts_before_a_plain_step_was_measured():
    policy = AdaptiveLength(4)
    assert policy.choose(MOST) == 0
    policy.observe_step(DecodeShape(4, 0), 0.4)
    assert policy.choose(MOST) == 0, "it may have captured a graph"
    policy.observe_step(DecodeShape(4, 0), 1e-3)
    assert policy.choose(MOST) > 0


def predicted(seconds: StepSeconds, num_rows: int) -> npt.NDArray[np.float64]:
    found = seconds.predict(num_rows)
    assert found is not None
    return found


def test_seconds_are_measured_or_follow_from_their_neighbours():
    seconds = StepSeconds([0, 2, 4, 8])
    assert seconds.predict(16) is None
    # The first step of a shape prepares the device.
    for own in (9e-3, 1e-3, 1.2e-3):
        seconds.add(16, 0, own)
    guessed = seconds.predict(16)
    assert guessed is not None
    assert guessed.tolist() == pytest.approx([1e-3, 1.2e-3, 1.4e-3, 1.8e-3])
    for _ in range(3):
        seconds.add(16, 2, 2e-3)
    filled = seconds.predict(15)
    assert filled is not None
    assert filled.tolist() == pytest.approx([1e-3, 1.5e-3, 2e-3, 3e-3])
    # Of other numbers of rows as here, and as much shorter as a plain step is.
    assert predicted(seconds, 40).tolist() == pytest.approx(filled.tolist())
    seconds.add(40, 0, 5e-4)
    assert predicted(seconds, 40).tolist() == pytest.approx([5e-4, 7.5e-4, 1e-3, 1.5e-3])


def test_seconds_of_other_numbers_of_rows_lie_between_those_that_are_known():
    """What is known of one length says how much longer steps of the others are."""
    seconds = StepSeconds([0, 2, 4])
    for num_rows, own in ((8, (1e-3, 3e-3, 3.2e-3)), (16, (2e-3, 4e-3, 8.2e-3))):
        for index, one in enumerate(own):
            for _ in range(3):
                seconds.add(num_rows, index, one)
    assert predicted(seconds, 12).tolist() == pytest.approx([1.5e-3, 3.5e-3, 5.7e-3])
    for _ in range(3):
        seconds.add(12, 2, 11.4e-3)
    assert predicted(seconds, 12).tolist() == pytest.approx([3e-3, 7e-3, 11.4e-3])
    seconds.add(12, 0, 1.5e-3)
    assert predicted(seconds, 12).tolist() == pytest.approx([1.5e-3, 1.5 * 3.5e-3, 11.4e-3])
    # And what is measured later, elsewhere, is heard of.
    for _ in range(200):
        seconds.add(8, 1, 5e-3)
    assert predicted(seconds, 10)[1] == pytest.approx(1.5 * 4.5e-3, rel=1e-3)


def test_first_steps_that_capture_do_not_end_a_length_for_ever():
    seconds = StepSeconds([0, 2, 4])
    seconds.add(8, 0, 0.4)
    assert seconds.predict(8) is None
    seconds.add(8, 0, 1e-3)
    assert predicted(seconds, 8)[1] == pytest.approx(1.2e-3)
    for _ in range(2):
        seconds.add(8, 1, 0.4)
        assert predicted(seconds, 8)[1] == pytest.approx(1.2e-3)
        assert seconds.are_known(8).tolist() == [True, False, False]
    seconds.add(8, 1, 3e-3)
    assert predicted(seconds, 8)[1] == pytest.approx(3e-3)
    # What is less than was expected is no capture.
    seconds.add(8, 2, 3.5e-3)
    assert predicted(seconds, 8)[2] == pytest.approx(3.5e-3)


def test_of_fewer_rows_drafts_are_thought_to_cost_less():
    """So that they are tried: whoever thinks too little of it pays one step."""
    seconds = StepSeconds([0, 1, 2, 4])
    for index, own in enumerate((1e-3, 5e-3, 6e-3, 8e-3)):
        for _ in range(3):
            seconds.add(64, index, own)
    assert predicted(seconds, 16).tolist() == pytest.approx([1e-3, 5e-3, 5.25e-3, 5.75e-3])
    assert predicted(seconds, 128).tolist() == pytest.approx([1e-3, 5e-3, 6e-3, 8e-3])


def test_numbers_of_rows_do_not_outdo_each_other():
    """Whatever was measured, what was not stays finite and above 0: one number that is neither
    would end all choosing."""
    rng = random.Random(3)
    seconds = StepSeconds([0, 1, 2, 3, 4, 6, 7])
    for _ in range(1500):
        own = rng.choice((1e-4, 1e-3, 1e-2, 0.5, 3.0))
        seconds.add(rng.choice((1, 2, 3, 5, 64, 300, 1025)), rng.choice((0, 1, 4, 6)), own)
        for num_rows in (1, 2, 3, 5, 64, 300, 1025):
            told = seconds.predict(num_rows)
            assert told is None or (told.min() > 1e-8 and told.max() < 1e6), (num_rows, told)


def seconds_of_plain_steps(policy: AdaptiveLength) -> float:
    return float(predicted(policy._seconds, 4)[0])


def test_a_plain_step_behind_drafts_has_waited_for_them_alone():
    """Where the host is slower than the device its gaps are the steps' own; a wait for samples that
    drafts were verified by is that of the two together."""
    policy = AdaptiveLength(4)
    for _ in range(4):
        policy.observe_step(DecodeShape(4, 0), 1e-3, 1e-3)
    assert seconds_of_plain_steps(policy) == pytest.approx(2e-3)
    policy.observe_step(DecodeShape(4, 2), 4e-3)
    for _ in range(50):
        policy.observe_step(DecodeShape(4, 2), 4e-3)
        policy.observe_step(DecodeShape(4, 0), 2e-3, 3e-3)
    assert seconds_of_plain_steps(policy) == pytest.approx(2e-3)


def test_earlier_runs_count_for_less_after_each_step() -> None:
    """Whoever asks in between: what was right once is believed less the longer ago it was."""
    acceptance = Acceptance(2)
    for _ in range(20):
        acceptance.add(2, 0)
    first = float(acceptance.chances()[0])
    for _ in range(400):
        acceptance.fade()
        acceptance.chances()
    faded = float(acceptance.chances()[0])
    assert first < 0.1
    assert faded > 0.6


def test_a_place_is_as_good_as_the_one_before_until_some_runs_say_otherwise() -> None:
    acceptance = Acceptance(3)
    for _ in range(200):
        acceptance.add(1, 1)
    for _ in range(2):
        acceptance.add(2, 1)
    after_two = float(acceptance.chances()[1])
    for _ in range(60):
        acceptance.add(2, 1)
    assert after_two > 0.7
    assert acceptance.chances()[1] < 0.15


def test_what_has_held_is_asked_less_often() -> None:
    """Trials of streams that have no drafts that are right: some while all is new, then fewer."""
    shapes = steps_taken(AdaptiveLength(MAX_DRAFT_TOKENS), AHEAD, [64] * 4000, 0.0)
    trials = [shape.num_drafts > 0 for shape, _ in shapes]
    first, last = sum(trials[:1000]), sum(trials[-1000:])
    assert 0 < last < first


def test_among_plain_steps_a_length_is_tried_twice_in_a_row():
    """The second has drafts behind drafts, as all steps would have."""
    policy, lengths = AdaptiveLength(2), []
    for _ in range(600):
        lengths.append(policy.choose(np.full(4, 2, dtype=np.int32)))
        if lengths[-1]:
            policy.observe_run(lengths[-1], 0)
        policy.observe_step(DecodeShape(4, lengths[-1]), 1e-3 * (1.0 + 0.2 * lengths[-1]))
    later = lengths[100:]
    tries = [
        place
        for place, (one, two) in enumerate(zip(later, later[1:], strict=False))
        if two and not one
    ]
    assert len(tries) > 3
    assert all(later[place + 1] == later[place + 2] for place in tries if place + 2 < len(later))


def test_a_length_that_is_not_known_is_tried_twice_in_a_row():
    """The first step of a shape may have captured a graph, and is not believed alone."""
    policy, most = AdaptiveLength(3), np.full(64, 3, dtype=np.int32)
    taken = []
    for _ in range(600):
        length = policy.choose(most)
        taken.append(length)
        for _ in range(64 if length else 0):
            policy.observe_run(length, min(length, 2))
        policy.observe_step(DecodeShape(64, length), 5e-3 + 1e-3 * length)
    # Two are right: of one and of three drafts only trials are left.
    assert taken[-1] == 2
    first = taken.index(1)
    assert taken[first + 1] == 1


def test_a_late_step_makes_no_other_length_the_better() -> None:
    seconds = StepSeconds([0, 1])
    for step in range(200):
        seconds.add(4, 1, 1.3e-3 if step % 50 == 49 else 1e-3)
    predicted = seconds.predict(4)
    assert predicted is not None
    assert predicted[1] == pytest.approx(1e-3, rel=0.01)


def test_a_wait_behind_plain_steps_is_not_taken_for_a_lengths_own():
    """All trials are among plain steps until one length pays, by a tenth."""
    device = PretendedDevice(
        weights_s=4e-3, token_s=0.0, row_s=0.0, draft_s=1e-4, behind_plain_s=2e-3, first_s=0.0
    )
    policy = AdaptiveLength(MAX_DRAFT_TOKENS)
    chance = chance_of(1.3)
    shapes = [shape for shape, _ in steps_taken(policy, device, [4] * 1500, chance)]
    assert sum(shape.num_drafts > 0 for shape in shapes[-500:]) > 400
