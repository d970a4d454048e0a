"""Runs the checks of an `interpreted_*` module by Triton's interpreter, in a process of its own:
Triton reads the variable when it is imported.
"""

import os
import subprocess
import sys

# A minute at most where cores are free; beside other tests it may get a tenth of one.
TIMEOUT_S = 900


def check_by_interpreter(module: str) -> None:
    """Raises AssertionError, with what the process wrote, when a check fails."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.interpreting", module],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S - 30,
    )
    assert done.stdout.strip() == "all equal", done.stderr
