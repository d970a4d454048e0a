"""A driver's process: rows as they come, noise passed, failures named, nothing left behind."""

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks.h200.engine_process import EngineFailedError, run_engine


def rows_of(code: str, folder: Path, timeout_s: float = 20.0) -> list[dict[str, float | str]]:
    return list(run_engine([sys.executable, "-c", code], os.environ, folder, timeout_s))


def test_rows_are_told_from_whatever_else_is_printed(tmp_path: Path) -> None:
    code = """print('{"engine": "x", "a": 1}'); print("{'no': 'json'}"); print('{"b": 2}')"""
    assert rows_of(code, tmp_path) == [{"engine": "x", "a": 1}]


def test_rows_that_came_before_a_failure_are_kept(tmp_path: Path) -> None:
    code = """print('{"engine": "x"}', flush=True); raise SystemExit(3)"""
    rows = run_engine([sys.executable, "-c", code], os.environ, tmp_path, 20.0)
    assert next(rows) == {"engine": "x"}
    with pytest.raises(EngineFailedError, match="status 3"):
        next(rows)


def test_an_engine_that_hangs_is_ended_with_its_children(tmp_path: Path) -> None:
    child = "import time; time.sleep(60)"
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}])
open("pid", "w").write(str(child.pid))
time.sleep(60)
"""
    with pytest.raises(EngineFailedError, match="its limit"):
        rows_of(code, tmp_path, timeout_s=2.0)
    pid = int((tmp_path / "pid").read_text())
    deadline_s = time.monotonic() + 5.0
    while time.monotonic() < deadline_s and _is_running(pid):
        time.sleep(0.05)
    assert not _is_running(pid)


def _is_running(pid: int) -> bool:
    """Whether it runs: one that ended may wait for whoever collects it."""
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rsplit(")", 1)[1].split()[0] != "Z"
