"""The GPU suite runs where plugins that pyproject.toml sets something for are not installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.nightly
def test_the_suite_needs_no_plugin_that_gpu_hosts_lack():
    """Unknown settings are errors: the plugin declares them. The closing lines are there."""
    command = [sys.executable, "-m", "pytest", "-p", "no:asyncio", "-p", "no:timeout", "-q"]
    command += ["-p", "no:cacheprovider", "tests/gpu/attention/test_torch_native.py"]
    environment = {**os.environ, "PYTEST_PLUGINS": "tests.gpu.plugin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no NVIDIA GPU" in done.stdout
    assert "5 skipped" in done.stdout
