"""The closing line of a run: skips by reason, most first."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

from tests.skips import skip_line

ROOT = Path(__file__).parents[3]
SUITE = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_a(number):
    pytest.skip("no NVIDIA GPU")

@pytest.mark.skipif(True, reason="no promtool (make tools)")
def test_b():
    pass

def test_c():
    pass
"""


def report(reason):
    return SimpleNamespace(longrepr=("file.py", 1, f"Skipped: {reason}"))


def test_skips_are_counted_by_reason():
    reports = [report("no promtool"), report("no NVIDIA GPU"), report("no NVIDIA GPU")]
    assert skip_line(reports) == "skipped: 2 no NVIDIA GPU, 1 no promtool"


def test_nothing_skipped_is_said_too():
    assert skip_line([]) == "skipped: 0"


def test_paths_do_not_make_reasons_differ():
    reports = [report("/tmp/a/0 is on no disk"), report("/tmp/a/1 is on no disk")]
    assert skip_line(reports) == "skipped: 2 a path is on no disk"


def test_a_run_ends_with_that_line(tmp_path):
    (tmp_path / "test_some.py").write_text(SUITE)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider",
         "--rootdir", tmp_path, tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped: 3 no NVIDIA GPU, 1 no promtool (make tools)" in done.stdout.splitlines()
