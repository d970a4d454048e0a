"""What is measured next: a few coarse steps as they come, then what is least decided."""

import pytest

from attention.tuning.agenda import NUM_FIRST, Agenda
from attention.tuning.table import TuningTable
from tests.unit.attention.tuning.doubles import DECODE, EXTEND, decode, extend

NAMES = {DECODE: ("a", "b"), EXTEND: ("a", "b")}
CLEAR, CLOSE = {"a": 1.0, "b": 1.5}, {"a": 1.0, "b": 1.01}
FIRST = [decode(1, 1 << n) for n in range(NUM_FIRST)]


def agenda_behind_first(points):
    agenda = Agenda([*FIRST, *points])
    taken = [agenda.take(TuningTable(NAMES)) for _ in FIRST]
    assert taken == FIRST
    return agenda


def test_phases_take_turns_until_one_has_no_more():
    agenda = Agenda([decode(1, 10), decode(2, 10), decode(3, 10), extend(1, 8)])
    assert agenda.phases == (DECODE, EXTEND)
    taken = [agenda.take(TuningTable(NAMES)) for _ in range(4)]
    assert taken == [decode(1, 10), extend(1, 8), decode(2, 10), decode(3, 10)]
    assert agenda.left == []
    with pytest.raises(IndexError, match="nothing is left"):
        agenda.take(TuningTable(NAMES))


def test_of_points_as_far_from_measured_ones_the_less_decided_comes_first():
    agenda = agenda_behind_first([decode(2, 1000), decode(128, 1000)])
    table = TuningTable(NAMES, {decode(1, 1000): CLEAR, decode(256, 1000): CLOSE})
    assert agenda.take(table) == decode(128, 1000)
    assert agenda.left == [decode(2, 1000)]


def test_of_points_as_decided_the_one_further_from_measured_ones_comes_first():
    near, far = decode(2, 1000), decode(16, 1000)
    agenda = agenda_behind_first([near, far])
    measured = {decode(1, 1000): CLEAR, decode(256, 1000): CLEAR}
    assert agenda.take(TuningTable(NAMES, measured)) == far
    again = agenda_behind_first([near, far])
    measured |= {decode(20, 1000): CLEAR}
    assert again.take(TuningTable(NAMES, measured)) == near


def test_what_is_measured_meanwhile_counts():
    points = [decode(n, 1000) for n in (2, 8, 64)]
    agenda = agenda_behind_first(points)
    table = TuningTable(NAMES, {decode(1, 1000): CLEAR})
    taken = []
    while agenda.left:
        taken.append(agenda.take(table))
        table = TuningTable(NAMES, {**table.seconds, taken[-1]: CLEAR})
    assert taken == [decode(64, 1000), decode(8, 1000), decode(2, 1000)]


def test_a_phase_of_which_all_candidates_are_out_is_no_error():
    agenda = agenda_behind_first([decode(2, 1000)])
    assert agenda.take(TuningTable({DECODE: (), EXTEND: ("a",)})) == decode(2, 1000)
