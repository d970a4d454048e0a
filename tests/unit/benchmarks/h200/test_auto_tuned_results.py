"""What auto-tuned promises, checked against mixes whose turns are known."""

import random
from dataclasses import replace

import pytest

from attention.tuning.candidates import AUTO_TUNED
from attention.tuning.table import LeftOut, TuningTable
from benchmarks.h200.auto_tuned_results import (
    MixResult,
    Promises,
    Timed,
    alike,
    mix_table,
    repeated,
)
from tests.unit.attention.tuning.doubles import DECODE, EXTEND, decode, extend

US = 1e-6


def result(mix, auto, taken="a", alike=(), **fixed):
    """Times in us, of all 2 layers; every one has three turns a percent apart."""
    times = {AUTO_TUNED: auto} | fixed
    turns = {name: [us * US * share for share in (0.99, 1.0, 1.01)] for name, us in times.items()}
    return MixResult(mix, turns, taken, "a 1.0 us", 2, frozenset({taken, *alike}))


def test_a_median_knows_how_far_it_may_be_off():
    turns = random.Random(0)
    medians = [Timed.of([turns.gauss(100.0, 2.0) for _ in range(41)]) for _ in range(200)]
    deviation = (sum((one.seconds - 100.0) ** 2 for one in medians) / 200) ** 0.5
    mean_error = sum(one.error_s for one in medians) / 200
    assert mean_error == pytest.approx(deviation, rel=0.2)


def test_a_ratio_has_the_errors_of_both():
    ratio = Timed(2.0, 0.06) / Timed(1.0, 0.04)
    assert ratio.seconds == 2.0
    assert ratio.error_s == pytest.approx(2.0 * 0.05)


@pytest.mark.parametrize(("auto", "is_over"), [(101.9, False), (102.1, True)])
def test_a_mix_is_held_against_its_best_fixed_choice(auto, is_over):
    one = result(decode(1, 99), auto, a=120.0, b=100.0)
    assert one.best == "b"
    assert one.ratio.seconds == pytest.approx(auto / 100.0)
    assert one.is_over == is_over


KEPT = [result(decode(1, 99), 100.0, a=100.0, b=150.0), result(extend(1, 8), 50.0, a=90.0, b=50.0)]


def test_promises_are_kept_by_all_mixes_and_their_sum():
    promises = Promises(KEPT)
    assert promises.are_kept
    assert promises.best_single[1].seconds == pytest.approx(190.0 * US)
    pair, total = promises.best_pair
    assert list(pair.values()) == ["a", "b"]
    assert total.seconds == pytest.approx(150.0 * US)
    assert "auto-tuned 0.7895 ±" in str(promises)
    assert "above 1.02: 0 of 2" in str(promises)


def test_one_slow_mix_breaks_them_and_is_told_with_what_was_foreseen():
    slow = result(decode(12, 1499), 106.0, a=106.0, b=100.0)
    promises = Promises([*KEPT, slow])
    assert not promises.are_kept
    assert promises.over == [slow]
    assert "decode 12 x 1500: took a; predicted a 1.0 us" in str(promises)


def test_who_is_as_fast_as_one_backend_alone_has_won_nothing():
    assert not Promises([result(decode(1, 99), 100.0, a=100.0, b=100.5)]).are_kept


def test_a_backend_that_some_mixes_lack_is_no_single_choice():
    lacking = result(decode(4, 99), 100.0, a=110.0, b=110.0, c=1.0)
    names, _ = Promises([*KEPT[:1], lacking]).best_single
    assert list(names.values()) == ["a"]


def test_phases_that_share_no_backend_have_no_single_choice_to_be_faster_than():
    own = [result(decode(1, 99), 100.0, a=100.0), result(extend(1, 8), 50.0, taken="b", b=50.0)]
    promises = Promises(own)
    assert promises.best_single is None
    assert list(promises.best_pair[0].values()) == ["a", "b"]
    assert promises.are_kept
    assert "no single backend attends in all phases" in str(promises)
    assert not Promises([*own, result(decode(2, 99), 106.0, taken="c", c=106.0, a=100.0)]).are_kept


def test_a_phase_whose_mixes_share_no_candidate_is_named():
    own = [result(decode(1, 99), 1.0, a=1.0), result(decode(2, 99), 1.0, taken="b", b=1.0)]
    with pytest.raises(ValueError, match="no candidate was timed with every mix of decode"):
        _ = Promises(own).best_pair


def test_where_the_fastest_was_taken_the_ratio_is_to_all_that_launch_the_same():
    """Two names of a kernel came to 98 and 102 us: the third turn of it is no wrong choice."""
    chance = result(decode(1, 699), 102.0, alike=("twin",), a=102.0, twin=98.0, other=150.0)
    assert chance.best == "twin"
    assert chance.ratio.seconds == pytest.approx(102.0 / 100.0, rel=0.005)
    costly = result(decode(1, 699), 106.0, alike=("twin",), a=102.0, twin=98.0, other=150.0)
    assert costly.is_over, "what auto-tuned itself costs stays"
    wrong = result(decode(1, 699), 102.0, alike=("twin",), a=102.0, twin=102.0, other=98.0)
    assert wrong.ratio.seconds == pytest.approx(102.0 / 98.0)
    text = str(Promises([chance, costly, wrong]))
    assert "or what launches the same, in 2 of 3" in text
    assert "1.060 ± " in text


def test_more_turns_of_a_mix_join_and_make_it_exact():
    one = result(decode(1, 99), 100.0, a=100.0)
    assert not one.is_exact
    joined = one
    for _ in range(24):
        joined = joined.joined(one)
    assert len(joined.turns["a"]) == 75
    assert joined.is_exact
    assert joined.ratio.seconds == pytest.approx(1.0)


def exact(mix, auto, **fixed):
    one = result(mix, auto, **fixed)
    return replace(one, turns={name: [own[1]] * 9 for name, own in one.turns.items()})


@pytest.mark.parametrize(
    ("first", "again", "num_asked", "ratio"),
    [
        (exact(decode(1, 99), 101.0, a=100.0), [], 0, 1.01),
        (exact(decode(1, 99), 103.0, a=100.0), [exact(decode(1, 99), 101.0, a=100.0)], 1, 1.01),
        (exact(decode(1, 99), 103.0, a=100.0), [exact(decode(1, 99), 104.0, a=100.0)], 1, 1.04),
        (result(decode(1, 99), 99.0, a=100.0), [result(decode(1, 99), 100.0, a=100.0)] * 9, 4, 1),
    ],
    ids=["exact", "by chance", "really", "until it is exact, but four times at most"],
)
def test_a_mix_is_timed_again_until_its_ratio_is_known(first, again, num_asked, ratio):
    asked = []

    def measure(mix):
        asked.append(mix)
        return again[len(asked) - 1]

    found = repeated(first, measure)
    assert len(asked) == num_asked
    assert found.ratio.seconds == pytest.approx(ratio)


def test_twins_of_twins_are_alike_in_their_phase_only():
    out = (
        LeftOut(EXTEND, "c", "", "b"),
        LeftOut(EXTEND, "b", "", "a"),
        LeftOut(EXTEND, "slow", "slow"),
        LeftOut(DECODE, "b", "", "d"),
    )
    names = dict.fromkeys((DECODE, EXTEND), ("a", "b", "c", "d", "slow"))
    table = TuningTable(names, {}, out)
    assert alike(table, EXTEND, "a") == alike(table, EXTEND, "c") == {"a", "b", "c"}
    assert alike(table, EXTEND, "slow") == {"slow"}
    assert alike(table, DECODE, "b") == {"b", "d"}


def test_a_row_shows_a_layers_times_and_the_ratios_error():
    table = mix_table([result(decode(1, 99), 102.0, taken="b", a=120.0, b=100.0)])
    (row,) = [line for line in table.splitlines() if "decode" in line]
    assert row.startswith("| decode 1 x 100 | b 50.0, a 60.0 | 51.0 | b | 1.020 ± 0.0")
