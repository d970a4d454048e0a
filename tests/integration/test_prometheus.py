"""The metrics under the tools that read them: promtool's lint and a Prometheus that scrapes."""

import json
import shutil
import subprocess

import httpx
import pytest

from tests.integration.services import http_text, is_ready, running_service, wait_until

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
    pytest.mark.skipif(shutil.which("promtool") is None, reason="needs Debian's prometheus"),
]


@pytest.fixture(scope="module")
def service(ray_session):
    with running_service("prometheus", 18500, num_replicas=2) as running:
        yield running


@pytest.fixture(scope="module")
def prometheus(service, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    target = f"127.0.0.1:{service.config.metrics.port}"
    job = {"job_name": "tessera", "static_configs": [{"targets": [target]}]}
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": [job]}
    (folder / "prometheus.yml").write_text(json.dumps(config))
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={PROMETHEUS_ADDRESS}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(lambda: answers(f"http://{PROMETHEUS_ADDRESS}/-/ready"))
            yield f"http://{PROMETHEUS_ADDRESS}"
        finally:
            process.terminate()
            process.wait(20)


def answers(url: str) -> bool:
    try:
        return httpx.get(url).status_code == 200
    except httpx.TransportError:
        return False


def query(prometheus: str, expression: str) -> list[dict]:
    answer = httpx.get(f"{prometheus}/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def test_promtool_finds_nothing_to_improve(service) -> None:
    assert is_ready(service.url)
    http_text(service, "def ", 8)
    wait_until(lambda: (service.metric("tessera_streamed_tokens_total") or 0) >= 8)
    text = httpx.get(service.metrics_url).text
    lint = subprocess.run(
        ["promtool", "check", "metrics"], input=text, text=True, capture_output=True, check=False
    )
    assert (lint.returncode, lint.stdout, lint.stderr) == (0, "", "")


def test_prometheus_scrapes_every_family_under_load(service, prometheus) -> None:
    def has_data() -> bool:
        for index in range(4):
            http_text(service, f"def function_{index}(", 24)
        return all(query(prometheus, expression) for expression in QUERIES.values())

    wait_until(has_data, timeout_s=60)
    assert query(prometheus, 'up{job="tessera"} == 1')
    scrape_s = float(query(prometheus, "scrape_duration_seconds")[0]["value"][1])
    assert scrape_s < 0.5
