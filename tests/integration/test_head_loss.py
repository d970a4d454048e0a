"""The loss of Ray's head with its state in Redis, short: the head alone, a fake engine.

    tests/integration/isolated.sh python -m tests.integration.head_loss --redis redis-server

is the long one. Needs redis-server on the PATH. A process of its own: its Ray is another cluster.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REDIS = shutil.which("redis-server")
ARGUMENTS = "--losses HEAD --streams 12 --real-streams 0 --away-s 3 --step-s 0.03 --quiet-s 3"


@pytest.mark.slow
@pytest.mark.timeout(150)
@pytest.mark.skipif(REDIS is None, reason="no redis-server on the PATH")
def test_no_request_notices_that_the_head_is_lost():
    done = subprocess.run(
        [sys.executable, "-m", "tests.integration.head_loss", "--redis", REDIS, *ARGUMENTS.split()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=140,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "0 broken promises" in done.stdout
