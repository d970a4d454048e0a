"""`http.proxy: haproxy` as the chart renders it: clients are served through HAProxy."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.chart_haproxy import NUM_TOKENS
from tests.integration.contained import contained

ROOT = Path(__file__).parents[2]


@pytest.mark.nightly
@pytest.mark.slow
def test_clients_are_served_through_the_charts_haproxy():
    done = subprocess.run(
        contained(sys.executable, "-m", "tests.integration.chart_haproxy"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])
    assert seen["text"]
    assert seen["streamed_text"] == seen["text"]
    assert seen["num_events"] > NUM_TOKENS / 2
    assert seen["content_type"].startswith("text/event-stream")
    assert seen["error"] == [404, "model_not_found"]
    # It is HAProxy that answered, and what the chart's network policies have to close is open.
    assert seen["statistics_port_answers"]
