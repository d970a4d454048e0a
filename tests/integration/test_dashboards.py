"""Every panel, variable and rule of the chart against a Prometheus that watched a busy service, and
what promtool says about the metrics.
"""

import subprocess
import time
from dataclasses import replace

import httpx
import psutil
import pytest

from tests.integration.dashboard_load import NUM_REPLICAS, running_load, service_settings
from tests.integration.prometheus_server import JOB, running_prometheus
from tests.integration.services import running_service, wait_until
from tests.integration.watched import Watched, finite_values, watch
from tests.programs import needed, skip_without
from tests.unit.dashboards.promql import scan
from tests.unit.dashboards.reading import (
    RULE_FILES,
    Panel,
    Query,
    Rule,
    read_dashboards,
    read_panels,
    read_rules,
)

BASE_PORT = 18620
ADDRESS = "127.0.0.1:18629"
NUM_CLIENTS = 22
MIN_LOAD_S = 8.0
MAX_LOAD_S = 120.0
PANELS = read_panels()
RULES = read_rules()
# Panels that stay at zero here, and why. Their series must exist all the same.
ALWAYS_ZERO = {
    "overview/Failed": "no replica is lost and nothing fails inside in this test",
    "router/Waiting for a replica": "no model is scaled to zero in this test",
}
# Panels without any series here, and why.
NOT_HERE = {
    "attention/Measured by auto-tuned, one layer": "the engines attend by the order of preferences",
    "attention/Tokens of experts by part": "the model has no experts",
    "attention/Busiest expert and part over the mean": "the model has no experts",
}
# Quantiles of what happens here by chance alone, if at all: their series exist, of no number.
LEFT_TO_CHANCE = {
    "tessera_stream_pause_seconds_bucket": "no replica is lost, so hardly any stream moves",
}
# What must be true of the metrics while there is load, whatever panels show.
EXPECTED = {
    "the service": f'up{{job="{JOB}"}} == 1',
    "attention of all phases": "count(sum by (phase) (tessera_attention_seconds_count)) == 3",
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
MAX_SCRAPE_S = 0.5
NUM_SCRAPES = 20
MAX_SCRAPE_CPU_S = 0.1

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    skip_without("prometheus", "promtool"),
]


@pytest.fixture(scope="module")
def service(ray_session):
    with running_service("dashboards", BASE_PORT, **service_settings(BASE_PORT)) as running:
        yield running


@pytest.fixture(scope="module")
def watched(service, tmp_path_factory):
    folder = tmp_path_factory.mktemp("prometheus")
    with running_prometheus(folder, ADDRESS, service.metrics_url, RULE_FILES) as prometheus:
        start_s = time.time()
        with running_load(service, lambda elapsed_s: NUM_CLIENTS):
            time.sleep(MIN_LOAD_S)
            seen = watch(prometheus, start_s)
            # What is still empty then is for the tests below to name.
            while has_gaps(seen) and time.time() < start_s + MAX_LOAD_S:
                time.sleep(1.0)
            end_s = time.time()
        yield seen.until(end_s)


def has_gaps(seen: Watched) -> bool:
    """Whether a panel or a rule has had no value yet, or none but zero without a reason."""
    now = seen.until(time.time())
    return any(complaint(now, panel) for panel in PANELS) or any(
        empty_selectors(now, rule) for rule in RULES
    )


def empty_selectors(seen: Watched, rule: Rule) -> list[str]:
    """What a rule looks at of which there has been no value."""
    selectors = [selector.text for selector in scan(rule.expression).selectors]
    return [text for text in selectors if not finite_values(seen.over_time(text))]


def complaint(seen: Watched, panel: Panel) -> str:
    if panel.name in NOT_HERE:
        found = [query for query in panel.queries if seen.over_time(query.expression)]
        return "has data: an excuse that is no longer needed" if found else ""
    largest = 0.0
    for query in panel.queries:
        series = seen.over_time(query.expression)
        values = finite_values(series)
        if not series or not (values or is_left_to_chance(query)):
            return f"no data: {query.expression}"
        largest = max(largest, *values, 0.0)
    is_zero = largest <= 0.0
    return "nothing but zero" if is_zero and panel.name not in ALWAYS_ZERO else ""


def is_left_to_chance(query: Query) -> bool:
    return any(series in query.expression for series in LEFT_TO_CHANCE)


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.name)
def test_a_panel_has_data_under_load(watched, panel) -> None:
    assert complaint(watched, panel) == ""


def test_the_panels_excused_from_being_more_than_zero_are_zero(watched) -> None:
    """An excuse that is no longer needed hides a fault."""
    for panel in PANELS:
        if panel.name in ALWAYS_ZERO:
            queries = [query for query in panel.queries if not is_left_to_chance(query)]
            values = [finite_values(watched.over_time(query.expression)) for query in queries]
            assert all(value == 0.0 for part in values for value in part)


def test_a_series_has_the_labels_of_its_legend(watched) -> None:
    for panel in PANELS:
        for query in panel.queries:
            wanted = {"replica", "reason", "code", "phase", "backend"} & set(
                scan(query.expression).grouping_labels
            )
            for one in watched.over_time(query.expression):
                assert wanted <= one["metric"].keys(), (panel.name, one["metric"])


def test_variables_find_the_service_and_its_replicas(watched) -> None:
    assert watched.variables["model"] == "builtin"
    assert watched.variables["job"] == JOB
    assert len(watched.variables["replica"].split("|")) == NUM_REPLICAS


def test_one_replica_can_be_looked_at_alone(watched) -> None:
    """Which of them had something to decode of late is left to the router."""
    replicas = watched.variables["replica"].split("|")
    alone = [replace(watched, variables=watched.variables | {"replica": one}) for one in replicas]
    (heatmap,) = [panel for panel in PANELS if panel.title == "Attention, decode"]
    for query in heatmap.queries:
        whole, *parts = (
            sum(finite_values(one.at_the_end(query.expression))) for one in (watched, *alone)
        )
        assert whole > 0
        assert sum(parts) == pytest.approx(whole)


def test_annotations_mark_when_engines_started(watched) -> None:
    (query,) = read_dashboards()[0].annotations
    started_ms = finite_values(watched.at_the_end(query.expression))
    assert len(started_ms) == NUM_REPLICAS
    assert all(0 < value / 1000 < watched.end_s for value in started_ms)


def test_prometheus_evaluates_every_rule_without_an_error(watched) -> None:
    loaded = watched.prometheus.rules()
    assert {rule["name"] for rule in loaded} == {rule.name for rule in RULES}
    bad = {rule["name"]: rule.get("lastError") for rule in loaded if rule["health"] != "ok"}
    assert not bad


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_rule_has_data_under_load(watched, rule) -> None:
    """A recording rule has recorded; everything that an alert looks at is there."""
    if rule.kind == "record":
        found = watched.prometheus.query(f"last_over_time({rule.name}[5m])")
        assert finite_values(found), found
    assert empty_selectors(watched, rule) == []
    assert isinstance(watched.prometheus.query(rule.expression, watched.end_s), list)


def test_no_alert_of_absence_fires_for_a_service_that_is_there(watched) -> None:
    rules = {rule.name: rule for rule in RULES}
    for name in ("TesseraExporterAbsent", "TesseraServiceVanished", "TesseraNoReplica"):
        assert watched.at_the_end(rules[name].expression) == []


@pytest.mark.parametrize("expression", EXPECTED.values(), ids=EXPECTED)
def test_prometheus_scrapes_every_family_under_load(watched, expression) -> None:
    assert watched.at_the_end(expression)


def test_a_scrape_waits_for_nothing_but_a_processor(watched) -> None:
    (took_s,) = watched.over_time(f'scrape_duration_seconds{{job="{JOB}"}}')
    # Of many the quickest: others of the machine take the cores for a while.
    assert min(finite_values([took_s])) < MAX_SCRAPE_S


def exporters_cpu_s() -> float:
    exporters = [
        process
        for process in psutil.process_iter(["cmdline"])
        if "ray::ExporterActor" in " ".join(process.info["cmdline"] or [])
    ]
    assert exporters
    return sum(sum(one.cpu_times()[:2]) for one in exporters)


def test_a_scrape_takes_little_of_a_processor(service, watched) -> None:
    """Of all series of a service that has been busy; how busy the machine is says nothing here."""
    before_s = exporters_cpu_s()
    for _ in range(NUM_SCRAPES):
        assert "tessera_step_seconds_count" in httpx.get(service.metrics_url, timeout=60).text
    assert (exporters_cpu_s() - before_s) / NUM_SCRAPES < MAX_SCRAPE_CPU_S


def test_promtool_finds_nothing_to_improve(service, watched) -> None:
    """In metrics of a service that has been busy, so that all of them are there."""
    wait_until(lambda: service.metric("tessera_running_requests") == 0)
    lint = subprocess.run(
        [needed("promtool"), "check", "metrics"],
        input=httpx.get(service.metrics_url).text,
        text=True,
        capture_output=True,
        check=False,
    )
    assert (lint.returncode, lint.stdout, lint.stderr) == (0, "", "")
