"""Runs the checks of `interpreted_*` modules by Triton's interpreter, in a process of its own:
Triton reads the variable when it is imported.
"""

import os
import subprocess
import sys

# A minute at most where cores are free; beside other tests it may get a tenth of one.
TIMEOUT_S = 900


def check_by_interpreter(*modules: str) -> None:
    """One after the other, in one process: what they import takes longer than most checks.

    Raises AssertionError, with what the process wrote, when a check fails.
    """
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.interpreting", *modules],
        # PyTorch's second thread would only wait, at full speed, for the next product.
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S - 30,
    )
    assert done.stdout.splitlines() == ["all equal"] * len(modules), done.stderr
