"""The chaos run, short: a fake engine on two nodes, what heals within seconds.

    tests/integration/isolated.sh python -m tests.integration.chaos

is the long one, over everything that can die. A process of its own: its Ray is another cluster.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.contained import contained

ROOT = Path(__file__).parents[2]
ARGUMENTS = (
    "--minutes 0.5 --streams 40 --real-streams 0 --nodes 2 --seed 11 --quiet-s 5 "
    "--min-wait-s 2 --max-wait-s 5 --kinds ENGINE INGRESS CONTROLLER REGISTRY METRICS STOP "
    "STOP_START"
)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_every_request_ends_as_promised_whatever_is_killed():
    done = subprocess.run(
        contained(sys.executable, "-m", "tests.integration.chaos", *ARGUMENTS.split()),
        cwd=ROOT,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=290,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "0 broken promises" in done.stdout
