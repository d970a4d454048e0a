"""The loss of Ray's head with its state in Redis, short: the head alone, a fake engine.

    tests/integration/isolated.sh python -m tests.integration.head_loss --redis redis-server

is the long one. A process of its own: its Ray is another cluster.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.contained import contained
from tests.programs import needed, skip_without

ROOT = Path(__file__).parents[2]
ARGUMENTS = "--losses HEAD --streams 12 --real-streams 0 --away-s 3 --step-s 0.03 --quiet-s 3"


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(150)
@skip_without("redis-server")
def test_no_request_notices_that_the_head_is_lost():
    done = subprocess.run(
        contained(
            sys.executable,
            "-m",
            "tests.integration.head_loss",
            "--redis",
            str(needed("redis-server")),
            *ARGUMENTS.split(),
        ),
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=140,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "0 broken promises" in done.stdout
