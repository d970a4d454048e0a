"""Measuring: within its time, in its order, and without those who cannot."""

import logging

import pytest

from attention.tuning.table import TuningTable
from attention.tuning.tune import tune
from tests.unit.attention.tuning.doubles import DECODE, EXTEND, KnownCosts, decode, extend

NAMES = {DECODE: ("a", "b"), EXTEND: ("a",)}
POINTS = [decode(n, 1000) for n in (1, 4, 16, 64, 256)]
COSTS = {"a": lambda point: 1.0, "b": lambda point: 0.5 + point.rows / 64}


def run(
    costs, points=POINTS, table=None, max_seconds=10.0, step_s=0.1, compiling_s=None, **changes
):
    measure = KnownCosts(costs, step_s=step_s, compiling_s=compiling_s or {})
    table = table or TuningTable(NAMES)
    return tune(table, points, measure, max_seconds, measure.clock, **changes), measure


def test_every_point_is_measured_and_the_fastest_follows():
    table, measure = run(COSTS)
    assert [point for point, _ in measure.asked] == POINTS
    assert [table.choose(point).name for point in POINTS] == ["b", "b", "b", "a", "a"]


def test_it_ends_in_time_and_says_what_is_left(caplog):
    table, measure = run(COSTS, max_seconds=0.15)
    assert len(measure.asked) == 3, "the first one compiles kernels and does not count"
    assert "2 of 5 kinds of steps were not measured" in caplog.text
    assert len(table.seconds) == 3


@pytest.mark.parametrize(("compiling_s", "num_measured"), [(0.1, 4), (0.3, 3)])
def test_compiling_does_not_count_up_to_as_much_again(compiling_s, num_measured, caplog):
    """Points take 0.1 s beside it; the first one's time is free."""
    caplog.set_level(logging.INFO)
    table, _ = run(COSTS, max_seconds=0.25, compiling_s={POINTS[1]: compiling_s, POINTS[0]: 7.0})
    assert len(table.seconds) == num_measured
    told = f"attention: {num_measured} kinds of steps took decode {num_measured * 0.1:.1f} s, "
    assert told + f"compiling kernels {7.0 + compiling_s:.1f} s" in caplog.text


def test_what_is_known_is_not_measured_again():
    known, _ = run(COSTS, points=POINTS[:3])
    table, measure = run(COSTS, table=known)
    assert [point for point, _ in measure.asked] == POINTS[3:]
    assert set(table.seconds) == set(POINTS)


def test_a_new_candidate_is_measured_beside_the_others():
    known, _ = run(COSTS)
    wider = TuningTable({DECODE: ("a", "b", "c"), EXTEND: ("a",)}, known.seconds)
    table, measure = run(COSTS | {"c": lambda point: 0.1}, table=wider)
    assert measure.asked[0] == (POINTS[0], ("a", "b", "c"))
    assert {table.choose(point).name for point in POINTS} == {"c"}


def test_a_candidate_that_fails_is_left_out_with_its_error(caplog):
    costs = COSTS | {"b": lambda point: "RuntimeError: no such kernel" if point.rows > 1 else 0.1}
    table, measure = run(costs)
    (out,) = table.left_out
    assert (out.phase, out.name) == (DECODE, "b")
    assert "RuntimeError: no such kernel" in out.reason
    assert "b failed at decode 4 x 1001 and is left out: RuntimeError" in caplog.text
    assert {table.choose(point).name for point in POINTS} == {"a"}
    assert len(measure.asked) == 2, "what is left has no rival"


def test_who_is_hopeless_is_measured_no_more(caplog):
    caplog.set_level(logging.INFO)
    names = {DECODE: ("a", "b", "slow"), EXTEND: ("a",)}
    table, measure = run(COSTS | {"slow": lambda point: 50.0}, table=TuningTable(names))
    assert [names for _, names in measure.asked] == [("a", "b", "slow")] * 4 + [("a", "b")]
    assert table.left_out[0].name == "slow"
    assert "times slower than the fastest at 4 points" in table.left_out[0].reason
    assert "slow is measured no more" in caplog.text
    again, measure = run(COSTS, table=TuningTable(names, table.seconds))
    assert measure.asked == [], "what is known says so at the next start, too"
    assert again.left_out == table.left_out


def test_who_is_slow_with_few_rows_only_is_not_hopeless():
    points = [decode(n, length) for n in (1, 2, 64) for length in (256, 1024, 4096)]
    costs = COSTS | {"b": lambda point: 9.0 if point.rows < 64 else 0.1}
    table, measure = run(costs, points=points)
    assert len(measure.asked) == len(points)
    assert table.choose(points[-1]).name == "b"


def test_a_phase_with_one_candidate_is_not_measured_unless_pools_are_compared():
    points = [extend(1, 64), decode(1, 1000)]
    _, measure = run(COSTS, points=points)
    assert [point for point, _ in measure.asked] == points[1:]
    _, measure = run(COSTS, points=points, least_contenders=1)
    assert [point for point, _ in measure.asked] == points


def test_progress_is_told_every_few_seconds(caplog):
    caplog.set_level(logging.INFO)
    run(COSTS, step_s=1.0)
    told = [record.getMessage() for record in caplog.records if "measuring" in record.message]
    assert told == [f"measuring attention: {n} of 5 kinds of steps" for n in (2, 4)]


THREE = TuningTable({DECODE: ("a", "b", "again"), EXTEND: ("a",)})
GRID = [decode(n, 16 * 4**k) for n in (1, 4, 16, 64) for k in range(4)]


def is_known(table):
    return all(point in table.seconds or table.is_settled(point) for point in GRID)


def test_who_launches_what_another_one_does_is_measured_no_more_and_is_never_taken(caplog):
    caplog.set_level(logging.INFO)
    wave = {point: 1.0 + 0.004 * (-1) ** n for n, point in enumerate(GRID)}
    costs = COSTS | {"again": lambda point: COSTS["b"](point) * wave[point]}
    table, measure = run(costs, points=GRID, table=THREE)
    three = ("a", "b", "again")
    assert [names for _, names in measure.asked[:10]] == [three] * 9 + [("a", "b")]
    assert three not in [names for _, names in measure.asked[10:]]
    assert is_known(table)
    (out,) = table.left_out
    assert (out.name, out.stand_in) == ("again", "b")
    assert "takes as long as b, which stands for it" in out.reason
    assert "again in decode: takes as long as b" in caplog.text
    assert {table.choose(point).name for point in GRID} == {"a", "b"}
    again, measure = run(costs, points=GRID, table=TuningTable(THREE.names, table.seconds))
    assert measure.asked == []
    assert again.left_out == table.left_out


def test_one_disturbed_point_makes_no_difference_of_twins():
    costs = COSTS | {"again": lambda point: COSTS["b"](point) * (1.4 if point == GRID[2] else 1.0)}
    table, _ = run(costs, points=GRID, table=THREE)
    assert [one.stand_in for one in table.left_out] == ["b"]


@pytest.mark.parametrize("factor", [0.98, 1.02])
def test_who_differs_by_more_than_timings_do_is_no_twin(factor):
    costs = COSTS | {"again": lambda point: COSTS["b"](point) * factor}
    table, measure = run(costs, points=GRID, table=THREE)
    assert table.left_out == ()
    assert {names for _, names in measure.asked} == {("a", "b", "again")}
    assert is_known(table)


def test_lengths_between_clear_wins_are_not_measured_and_are_not_told_as_left(caplog):
    costs = {"a": lambda point: 1.0, "b": lambda point: 1.3 if point.rows < 9 else 1.05}
    points = [decode(n, keys) for keys in (200, 1000, 500) for n in (4, 16)]
    table, measure = run(costs, points=points)
    assert [point for point, _ in measure.asked] == [*points[:4], decode(16, 500)]
    _, measure = run(costs, points=[*points[:4], decode(4, 500)], max_seconds=0.25)
    assert "were not measured" not in caplog.text


def test_who_was_left_out_one_after_the_other_is_left_out_again_by_what_is_known():
    """b2 goes after ten points, as one of them was disturbed; two of these have no time of a2."""
    points = sorted(GRID, key=lambda point: point.prefix_tokens)
    names = {DECODE: ("a", "a2", "b", "b2"), EXTEND: ("a",)}
    disturbed = {"b2": lambda point: COSTS["b"](point) * (1.4 if point == points[2] else 1.0)}
    costs = COSTS | {"a2": COSTS["a"]} | disturbed
    table, first = run(costs, points=points, table=TuningTable(names))
    assert [len(asked) for _, asked in first.asked] == [4] * 8 + [3] * 2 + [2] * 6
    again, measure = run(costs, points=points, table=TuningTable(names, table.seconds))
    assert measure.asked == []
    assert again.left_out == table.left_out


def test_who_was_stood_for_comes_back_where_its_stand_in_fails():
    """Else a phase would be left with who is slower, or with nobody."""
    broken = GRID[12]
    costs = {
        "a": lambda point: 2.5,
        "b": lambda point: "RuntimeError: no such kernel" if point == broken else 1.0,
        "again": lambda point: 1.0,
    }
    table, _ = run(costs, points=GRID, table=THREE)
    assert [(one.name, one.stand_in) for one in table.left_out] == [("b", "")]
    assert table.contenders(DECODE) == ("a", "again")
    assert {table.choose(point).name for point in GRID} == {"again"}
    names = {DECODE: ("b", "again"), EXTEND: ("a",)}
    table, _ = run(costs, points=GRID, table=TuningTable(names), least_contenders=1)
    assert table.contenders(DECODE) == ("again",), "pools of other pages are compared: one is left"
