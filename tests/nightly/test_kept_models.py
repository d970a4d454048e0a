"""Models whose weights stay as they are stored, by Triton's interpreter: alone, over two ranks,
and with adapters."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="comes with torch for CUDA only")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("checks", ["interpreted_kept_models", "interpreted_kept_adapters"])
def test_logits_are_those_of_dequantised_weights(checks) -> None:
    """In a process of its own: Triton reads the variable when it is imported."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.fakes.{checks}"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip() == "all equal", done.stderr
