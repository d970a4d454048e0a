"""Mixtures of experts: the kernels by Triton's interpreter."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="comes with torch for CUDA only")


@pytest.mark.parametrize(
    "checks",
    [
        "tests.fakes.interpreted_kernels",
        pytest.param("tests.fakes.interpreted_adapters", marks=pytest.mark.nightly),
    ],
)
def test_kernels_compute_what_plain_torch_does(checks) -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", checks],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "all equal", done.stderr
