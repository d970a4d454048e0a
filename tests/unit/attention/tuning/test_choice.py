"""Who may be taken: whoever is the fastest at a measured step or between some."""

from attention.tuning.candidates import CandidateSet
from attention.tuning.choice import TunedRoutes
from attention.tuning.table import TuningTable
from tests.unit.attention.tuning.doubles import DECODE, EXTEND, decode


def tuned_by(seconds):
    names = tuple(next(iter(seconds.values())))
    layers = {phase: {name: (name,) for name in names} for phase in (DECODE, EXTEND)}
    table = TuningTable(dict.fromkeys(layers, names), seconds)
    return TunedRoutes(CandidateSet(16, False, layers), table, 32768, 1)


def test_who_is_second_at_both_ends_and_the_fastest_between_them_is_taken_there():
    seconds = {
        decode(1, 1000): {"few": 1.0, "many": 16.0, "both": 1.1},
        decode(256, 1000): {"few": 16.0, "many": 1.0, "both": 1.1},
        decode(1, 4000): {"few": 1.0, "many": 16.0, "both": 15.0},
    }
    tuned = tuned_by(seconds)
    assert tuned.table.best(DECODE) == "few"
    assert set(tuned.chosen[DECODE]) == {"few", "many", "both"}
    assert [tuned.choose(decode(n, 1000)).name for n in (1, 16, 256)] == ["few", "both", "many"]


def test_who_is_the_fastest_nowhere_is_no_choice():
    seconds = {
        decode(1, 1000): {"few": 1.0, "many": 2.0, "slow": 1.9},
        decode(256, 1000): {"few": 2.0, "many": 1.0, "slow": 1.9},
    }
    tuned = tuned_by(seconds)
    assert set(tuned.chosen[DECODE]) == {"few", "many"}
    assert tuned.chosen[EXTEND] == ("few",)
