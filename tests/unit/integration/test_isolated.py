"""Nothing that runs under isolated.sh outlives it, however it ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = str(Path(__file__).parents[3] / "tests" / "integration" / "isolated.sh")
CAN_ISOLATE = not subprocess.run(
    ["unshare", "-rpf", "--mount-proc", "true"], capture_output=True, check=False
).returncode
pytestmark = pytest.mark.skipif(not CAN_ISOLATE, reason="no process namespaces here")

# A child in a session of its own, as raylets are, which holds a file of the test open.
LEAVES_A_CHILD = """
import subprocess, sys, time
subprocess.Popen(["sleep", "600"], start_new_session=True, stdin=open({held!r}))
print("started", flush=True)
{then}
"""


def holders(path: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if any(leads_to(path, link) for link in Path(f"/proc/{process.pid}/fd").iterdir()):
                found.append(process)
    return found


def leads_to(path: Path, link: Path) -> bool:
    """Whether link is an open file's; one that was closed since it was listed leads nowhere."""
    try:
        return os.readlink(link) == str(path)
    except OSError:
        return False


def wait_until_nobody_holds(path: Path) -> None:
    end_s = time.monotonic() + 10
    while holders(path):
        assert time.monotonic() < end_s, holders(path)
        time.sleep(0.05)


def started(held: Path, then: str, *outer: str) -> subprocess.Popen[str]:
    held.touch()
    code = LEAVES_A_CHILD.format(held=str(held), then=then)
    process = subprocess.Popen(
        [*outer, SCRIPT, sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    return process


def test_what_a_command_leaves_ends_with_it_and_its_status_is_kept(tmp_path):
    process = started(tmp_path / "held", "sys.exit(7)")
    assert process.wait(10) == 7
    wait_until_nobody_holds(tmp_path / "held")


def test_a_kill_ends_everything(tmp_path):
    process = started(tmp_path / "held", "time.sleep(600)")
    assert holders(tmp_path / "held")
    process.kill()
    process.wait(10)
    wait_until_nobody_holds(tmp_path / "held")


def test_a_kill_ends_what_runs_isolated_within_it_too(tmp_path):
    process = started(tmp_path / "held", "time.sleep(600)", SCRIPT)
    assert holders(tmp_path / "held")
    process.kill()
    process.wait(10)
    wait_until_nobody_holds(tmp_path / "held")


def test_a_signal_to_the_group_reaches_the_command_once(tmp_path):
    then = """
import signal
seen = []
signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
print("ready", flush=True)
while not seen:
    time.sleep(0.05)
time.sleep(0.5)
sys.exit(40 + len(seen))
"""
    process = started(tmp_path / "held", then)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(10) == 41


def test_a_command_that_a_signal_ended_tells_which(tmp_path):
    process = started(tmp_path / "held", "import os; os.kill(os.getpid(), 9)")
    assert process.wait(10) == 128 + signal.SIGKILL
