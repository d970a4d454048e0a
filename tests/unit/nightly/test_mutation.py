"""The mutation run: which mutants count, and when it fails."""

import ast
from pathlib import Path

import pytest

from tests.nightly.equivalent_mutants import EQUIVALENT
from tests.nightly.mutants import Mutant, changes_words_only, python_files
from tests.nightly.mutation import AREAS, Outcome, faults, whole, wilson_interval

ROOT = Path(__file__).parents[3]
SOURCE = """
def f(a, b):
    if a > 1:
        logger.warning("a is %s", a)
        raise ApiError(Code.FULL, "too many requests", "param")
    return g(f"{a + 1} of them", b["key"], message, text="more words")
"""


def mutant(before, after):
    assert before in SOURCE
    return ast.parse(SOURCE), ast.parse(SOURCE.replace(before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('"too many requests"', '"XXtoo many requestsXX"'),
        ('"too many requests"', "None"),
        (', "too many requests"', ""),
        ("{a + 1} of them", "{a - 1} of them"),
        ('text="more words"', "text=None"),
        ("message", "None"),
        (', text="more words"', ""),
        ('logger.warning("a is %s", a)', 'logger.warning("a is %s", None)'),
        ('logger.warning("a is %s", a)', "logger.warning(a)"),
    ],
)
def test_a_change_of_words_does_not_count(before, after):
    assert changes_words_only(*mutant(before, after))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a > 1", "a >= 1"),
        ("Code.FULL", "None"),
        ('"param"', "None"),
        (', "param"', ""),
        ('b["key"]', 'b["KEY"]'),
        ('return g(f"{a + 1} of them", b["key"]', 'return g(None, b["KEY"]'),
        ("def f(a, b)", "def f(a, b=1)"),
    ],
)
def test_any_other_change_counts(before, after):
    assert not changes_words_only(*mutant(before, after))


def test_a_change_is_told_by_its_lines_without_their_indentation():
    original = "def f(a):\n    if a:\n        return 1\n    return 2"
    changed = Mutant("m", "p.py", original, original.replace("return 1", "return 0"))
    assert changed.change == ("return 1", "return 0")
    assert "-        return 1\n+        return 0" in changed.diff


def outcome(area, num_mutants, num_killed, num_survivors):
    survivors = [Mutant("m", "p.py", "a", "b")] * num_survivors
    return Outcome(area, num_mutants, num_killed, survivors)


def test_the_interval_is_wilsons():
    """Newcombe 1998, table I: 81 of 263, and 0 of 20."""
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(20, 20)[1] == pytest.approx(1.0)


def test_areas_count_by_their_mutants_and_not_by_their_samples():
    share, half = whole([outcome("large", 900, 80, 20), outcome("small", 100, 100, 0)])
    assert share == pytest.approx(0.9 * 0.8 + 0.1 * 1.0)
    assert half == pytest.approx(1.96 * 0.9 * (0.8 * 0.2 / 100) ** 0.5)


def test_it_fails_below_the_floor_of_an_area_and_below_that_of_all():
    good, bad = outcome("good", 1000, 95, 5), outcome("bad", 10, 84, 16)
    assert faults([good, good]) == []
    assert faults([good, bad]) == ["bad: 84.0% is below 85%"]
    middling = outcome("middling", 1000, 89, 11)
    assert faults([middling, middling]) == ["all areas: 89.0% is below 90%"]


@pytest.mark.parametrize("area", AREAS)
def test_an_areas_files_and_tests_are_there(area):
    assert len(python_files(ROOT, AREAS[area].files)) > 1
    assert all((ROOT / folder).exists() for folder in AREAS[area].tests)


def test_what_is_listed_as_equivalent_is_still_in_the_code_and_has_its_reason():
    for (path, before, _), reason in EQUIVALENT.items():
        lines = [line.strip() for line in (ROOT / path).read_text().splitlines()]
        assert before.splitlines()[0] in lines, (path, before)
        assert len(reason.split()) > 3
