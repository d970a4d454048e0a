"""What auto-tuned promises, checked against mixes whose turns are known."""

import random

import pytest

from attention.tuning.candidates import AUTO_TUNED
from benchmarks.h200.auto_tuned_results import MixResult, Promises, Timed, mix_table
from tests.unit.attention.tuning.doubles import decode, extend

US = 1e-6


def result(mix, auto, taken="a", **fixed):
    """Times in us, of all 2 layers; every one has three turns a percent apart."""
    times = {AUTO_TUNED: auto} | fixed
    turns = {name: [us * US * share for share in (0.99, 1.0, 1.01)] for name, us in times.items()}
    return MixResult(mix, turns, taken, "a 1.0 us", 2)


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
    assert promises.best_pair(is_single=True)[1].seconds == pytest.approx(190.0 * US)
    pair, total = promises.best_pair(is_single=False)
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
    names, _ = Promises([*KEPT[:1], lacking]).best_pair(is_single=True)
    assert list(names.values()) == ["a"]


def test_a_row_shows_a_layers_times_and_the_ratios_error():
    table = mix_table([result(decode(1, 99), 102.0, taken="b", a=120.0, b=100.0)])
    (row,) = [line for line in table.splitlines() if "decode" in line]
    assert row.startswith("| decode 1 x 100 | b 50.0, a 60.0 | 51.0 | b | 1.020 ± 0.0")
