"""The metrics under the tools that read them: promtool's lint and a Prometheus that scrapes."""

import subprocess

import httpx
import pytest

from tests.integration.prometheus_server import running_prometheus
from tests.integration.services import http_text, is_ready, running_service, wait_until
from tests.programs import needed, skip_without

PROMETHEUS_ADDRESS = "127.0.0.1:18599"
QUERIES = {
    "attention of both phases": "count(sum by (phase) (tessera_attention_seconds_count)) == 2",
    "steps": "sum(rate(tessera_step_seconds_count[5s])) > 0",
    "time to first token": (
        "histogram_quantile(0.5, sum by (le) ("
        "rate(tessera_time_to_first_token_seconds_bucket[5s]))) > 0"
    ),
    "inter-token latency": "sum(rate(tessera_inter_token_latency_seconds_count[5s])) > 0",
    "what Ray and the wire add": "sum(tessera_serve_overhead_seconds_count) > 0",
    "both engine replicas": 'count(tessera_engine_info{process="engine"}) == 2',
    "routing": "sum by (reason) (tessera_routing_decisions_total) > 0",
    "pages": "min(tessera_kv_pages) > 0",
}

pytestmark = [
    pytest.mark.timeout(200),
    skip_without("prometheus", "promtool"),
]


@pytest.fixture(scope="module")
def service(ray_session):
    with running_service("prometheus", 18500, num_replicas=2) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(service, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    with running_prometheus(folder, PROMETHEUS_ADDRESS, service.metrics_url) as running:
        yield running


def test_promtool_finds_nothing_to_improve(service) -> None:
    assert is_ready(service.url)
    http_text(service, "def ", 8)
    wait_until(lambda: (service.metric("tessera_streamed_tokens_total") or 0) >= 8)
    text = httpx.get(service.metrics_url).text
    lint = subprocess.run(
        [needed("promtool"), "check", "metrics"],
        input=text,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (lint.returncode, lint.stdout, lint.stderr) == (0, "", "")


def test_prometheus_scrapes_every_family_under_load(service, prometheus) -> None:
    def has_data() -> bool:
        for index in range(4):
            http_text(service, f"def function_{index}(", 24)
        return all(prometheus.query(expression) for expression in QUERIES.values())

    wait_until(has_data, timeout_s=60)
    assert prometheus.query('up{job="tessera"} == 1')
    scrape_s = float(prometheus.query("scrape_duration_seconds")[0]["value"][1])
    assert scrape_s < 0.5
