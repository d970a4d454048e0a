"""Tests that need a GPU stand in tests/gpu: `make test-gpu` runs no other folder."""

from pathlib import Path

TESTS = Path(__file__).parents[2]
MARK = "mark." + "gpu"


def test_no_other_folder_marks_tests_for_a_gpu():
    outside = [path for path in TESTS.rglob("*.py") if TESTS / "gpu" not in path.parents]
    assert len(outside) > 100
    assert [str(path) for path in outside if MARK in path.read_text(encoding="utf-8")] == []


def test_every_module_of_the_suite_says_what_it_needs():
    modules = list((TESTS / "gpu").rglob("test_*.py"))
    assert len(modules) > 10
    unmarked = [path for path in modules if "pytestmark = " not in path.read_text("utf-8")]
    assert unmarked == []
