"""The kernels of kept weights, by Triton's interpreter."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="comes with torch for CUDA only")


def test_kernels_compute_what_dequantised_weights_do() -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.fakes.interpreted_quantised"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip() == "all equal", done.stderr
