"""Commands that start clusters of their own, so that nothing of them outlives the test."""

import os
import signal
import subprocess
from pathlib import Path

ISOLATED = str(Path(__file__).parent / "isolated.sh")


def contained(*command: str) -> list[str]:
    """The command in a process namespace: whoever kills it kills all that it started."""
    return [ISOLATED, *command]


def terminate(process: "subprocess.Popen[str]") -> None:
    """SIGTERM to a contained command that was started with start_new_session."""
    os.killpg(process.pid, signal.SIGTERM)
