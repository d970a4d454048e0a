"""A node drained as the chart's pods drain theirs: streams end whole and replicas move."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.chart_cluster import NUM_TOKENS
from tests.integration.contained import contained

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("role", ["engine", "ingress"])
def test_a_stream_outlives_the_drain_of_its_node(role):
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
    }
    done = subprocess.run(
        contained(sys.executable, "-m", "tests.integration.chart_cluster", role),
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    assert seen["error"] is None
    assert seen["tokens_before_drain"] < NUM_TOKENS
    assert (seen["num_tokens"], seen["finish_reason"]) == (NUM_TOKENS, "length")
    assert seen["has_moved"]
    assert seen["answers_after"]
    # Its address is what Prometheus scrapes: it must not depend on who was there first.
    assert seen["is_exporter_on_head"]
