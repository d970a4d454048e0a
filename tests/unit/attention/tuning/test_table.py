"""The table: who is the fastest at a point, between points, and where nothing was measured."""

import random

import pytest

from attention.timing import AttentionPhase
from attention.tuning.points import MIN_UNEVEN_ROWS, StepLimits, StepPoint, points_to_measure
from attention.tuning.table import LeftOut, TuningTable
from tests.unit.attention.tuning.doubles import DECODE, EXTEND, decode, extend

NAMES = {DECODE: ("a", "b"), EXTEND: ("a", "b")}


def table_of(seconds, **changes):
    return TuningTable(NAMES, seconds, **changes)


def test_the_fastest_is_taken_at_each_point():
    points = {decode(1, 1000): {"a": 1.0, "b": 2.0}, decode(64, 1000): {"a": 9.0, "b": 5.0}}
    table = table_of(points)
    assert table.choose(decode(1, 1000)).name == "a"
    chosen = table.choose(decode(64, 1000))
    assert chosen.name == "b"
    assert chosen.seconds == pytest.approx({"a": 9.0, "b": 5.0})
    assert chosen.reason(num_layers=2) == "b 2500000.0 us, a 4500000.0 us"


def test_between_points_times_grow_by_powers():
    """a costs 1, b a sixteenth a row: they meet at 16."""
    corners = {decode(n, 1000): {"a": 1.0, "b": n / 16} for n in (1, 256)}
    table = table_of(corners)
    assert table.choose(decode(16, 1000)).seconds == pytest.approx({"a": 1.0, "b": 1.0})
    assert [table.choose(decode(n, 1000)).name for n in (8, 15, 18, 100)] == ["b", "b", "a", "a"]


def test_beyond_the_points_the_nearest_ones_count():
    table = table_of({decode(4, 1000): {"a": 2.0, "b": 1.0}})
    for point in (decode(1, 0), decode(512, 100_000), decode(4, 1000, is_uneven=True)):
        assert table.choose(point).seconds == pytest.approx({"a": 2.0, "b": 1.0})


def test_corners_that_were_not_measured_do_not_count():
    seconds = {
        decode(1, 256): {"a": 1.0, "b": 2.0},
        decode(16, 256): {"a": 1.0, "b": 2.0},
        decode(1, 65536): {"a": 4.0, "b": 1.0},
    }
    assert table_of(seconds).choose(decode(8, 10_000)).seconds["a"] < 4.0
    assert table_of(seconds).choose(decode(16, 65536)).name in ("a", "b")


def test_unlike_lengths_have_times_of_their_own():
    seconds = {
        decode(16, 1000): {"a": 1.0, "b": 1.2},
        decode(16, 1000, is_uneven=True): {"a": 1.3, "b": 1.1},
    }
    table = table_of(seconds)
    assert table.choose(decode(16, 1000)).name == "a"
    assert table.choose(decode(16, 1000, is_uneven=True)).name == "b"


def test_who_wins_by_less_than_timings_vary_is_not_taken():
    seconds = {
        decode(1, 1000): {"a": 1.0, "b": 2.0},
        decode(64, 1000): {"a": 1.0, "b": 0.997},
        decode(256, 1000): {"a": 1.0, "b": 0.98},
    }
    table = table_of(seconds)
    assert table.best(DECODE) == "a"
    assert [table.choose(decode(n, 1000)).name for n in (64, 256)] == ["a", "b"]


def test_where_nothing_was_measured_the_first_in_the_order_is_taken():
    chosen = table_of({}).choose(extend(8, 100))
    assert (chosen.name, dict(chosen.seconds)) == ("a", {})


def test_a_phase_that_is_not_measured_goes_by_prompts():
    table = table_of({extend(8, 4, 1000): {"a": 2.0, "b": 1.0}})
    assert table.choose(StepPoint(AttentionPhase.VERIFY, 8, 4, 1000)).name == "b"


def test_who_is_left_out_is_never_taken_and_its_lack_hides_no_point():
    out = LeftOut(DECODE, "a", "failed")
    table = table_of(
        {decode(1, 10): {"b": 1.0}, extend(1, 10): {"a": 1.0, "b": 2.0}}, left_out=(out,)
    )
    assert table.contenders(DECODE) == ("b",)
    assert table.choose(decode(1, 10)).name == "b"
    assert table.choose(extend(1, 10)).name == "a"
    assert table.missing(decode(1, 10)) == ()
    with pytest.raises(ValueError, match="no candidate for decode"):
        table_of({}, left_out=(out, LeftOut(DECODE, "b", "failed"))).best(DECODE)


def test_a_point_that_lacks_a_contender_says_nothing():
    table = table_of({decode(1, 10): {"b": 1.0}, decode(64, 10): {"a": 1.0, "b": 2.0}})
    assert table.missing(decode(1, 10)) == ("a",)
    assert table.choose(decode(1, 10)).name == "a"


SETTLED = {"a": 1.0, "b": 1.2}


@pytest.mark.parametrize(
    ("longer", "is_settled"),
    [
        (decode(4, 4000), True),
        (decode(4, 8000), False),
        (decode(4, 1500), False),
        (decode(8, 4000), False),
        (decode(4, 4000, is_uneven=True), False),
        (extend(4, 1, 4000), False),
    ],
    ids=str,
)
def test_between_lengths_at_which_the_same_one_clearly_wins_nothing_is_in_doubt(longer, is_settled):
    table = table_of({decode(4, 1000): SETTLED, longer: SETTLED})
    assert table.is_settled(decode(4, 2000)) == is_settled


@pytest.mark.parametrize("at", [{"a": 1.0, "b": 1.05}, {"a": 1.2, "b": 1.0}, {"a": 1.0}])
def test_narrow_wins_and_other_winners_settle_nothing(at):
    table = table_of({decode(4, 1000): SETTLED, decode(4, 4000): at})
    assert not table.is_settled(decode(4, 2000))


def test_only_the_next_lengths_settle():
    close = {"a": 1.0, "b": 1.01}
    table = table_of({decode(4, 500): SETTLED, decode(4, 1000): close, decode(4, 4000): SETTLED})
    assert not table.is_settled(decode(4, 2000))
    assert not table.is_settled(decode(4, 8000))


SHORT = {"a": 30.0, "b": 27.0}
"""b starts sooner, a multiplies faster: by more than b wins by anywhere."""
LONG = {"a": 100.0, "b": 140.0}


def test_a_step_unlike_all_that_were_measured_takes_the_phases_best():
    """As an H200's start that ran out of time took for 64 x 100 what had won 64 x 8."""
    short = {extend(64, 8): SHORT, extend(1, 32): SHORT}
    long = {extend(1, 512, 992): LONG, extend(4, 2048, 992): LONG, extend(16, 256, 4064): LONG}
    table = table_of(short | long)
    assert table.best(EXTEND) == "a"
    assert [table.choose(point).name for point in (extend(64, 8), extend(48, 12, 100))] == ["b"] * 2
    for far in (extend(64, 100), extend(1, 1, 30_000)):
        chosen = table.choose(far)
        assert (chosen.name, chosen.is_near) == ("a", False)
        assert chosen.reason(1).endswith(" us at the nearest step, too far to count")


def test_what_missing_corners_would_weigh_the_nearest_step_has():
    seconds = {extend(64, 8): SHORT, extend(16, 128): LONG, extend(1, 2048): LONG}
    chosen = table_of(seconds).choose(extend(60, 110))
    assert chosen.name == "a"
    assert LONG["a"] > chosen.seconds["a"] > 80.0


def test_between_settled_lengths_each_number_of_rows_has_lengths_of_its_own():
    """4 rows lack 2,000 keys, where 8 rows were measured: their own neighbours tell of it."""
    clear = {"a": 1.0, "b": 1.2}
    other = {"a": 9.0, "b": 1.0}
    seconds = {decode(4, n): clear for n in (1000, 4000)}
    seconds |= {decode(8, n): other for n in (1000, 2000, 4000)}
    chosen = table_of(seconds).choose(decode(4, 2000))
    assert chosen.name == "a"
    assert chosen.seconds == pytest.approx(clear)


def test_within_a_whole_grid_every_step_is_near_a_measured_one():
    limits = StepLimits(256, 8192, 32768, 1 << 18)
    table = table_of(dict.fromkeys(points_to_measure(limits), SHORT))
    places = random.Random(0)
    for _ in range(2000):
        rows = round(2 ** places.uniform(0, 8))
        new, prefix = round(2 ** places.uniform(0, 13)), round(2 ** places.uniform(0, 15))
        is_uneven = rows >= MIN_UNEVEN_ROWS and places.random() < 0.3
        phase = places.choice((DECODE, EXTEND))
        point = StepPoint(phase, rows, 1 if phase is DECODE else new, prefix, is_uneven)
        if limits.allow(point):
            assert table.choose(point).is_near, point
