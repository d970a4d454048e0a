"""An engine's driver as a process: its JSON lines as they come, and nothing left running after it.

Engines start children of their own; they all are one process group, which ends with the driver.
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

Row = dict[str, float | str]

GROUP_END_S = 20.0


class EngineFailedError(Exception):
    """The driver ended with an error or did not end in time."""


def run_engine(
    command: list[str], environment: Mapping[str, str], folder: Path, timeout_s: float
) -> Iterator[Row]:
    """The rows that the driver prints; other lines are passed, errors go to our stderr.

    Raises EngineFailedError after the last of them. GPU memory is free again when this ends: the
    whole process group is gone.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=dict(environment),
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    is_late = threading.Event()

    def stop() -> None:
        is_late.set()
        _kill_group(process.pid)

    timer = threading.Timer(timeout_s, stop)
    timer.start()
    try:
        if process.stdout is None:
            raise RuntimeError("a pipe was asked for")
        for line in process.stdout:
            row = _row(line)
            if row is not None:
                yield row
        status = process.wait()
    finally:
        timer.cancel()
        end_group(process)
    if is_late.is_set():
        raise EngineFailedError(f"ended after {timeout_s:g} s, its limit")
    if status != 0:
        raise EngineFailedError(f"exit status {status}")


def _row(line: str) -> Row | None:
    """A line of a driver's own, among what an engine prints besides."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return None
    return row if isinstance(row, dict) and "engine" in row else None


def end_group(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Children that outlive the driver hold GPU memory: end them and wait until they are gone."""
    _kill_group(process.pid)
    process.wait()
    deadline_s = time.monotonic() + GROUP_END_S
    while _has_members(process.pid) and time.monotonic() < deadline_s:
        time.sleep(0.05)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
