"""Recording and alert rules: promtool's own unit tests, and what no promtool checks."""

import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from service.errors import ApiErrorCode
from tests.programs import needed
from tests.unit.dashboards.catalogue import exported_metrics
from tests.unit.dashboards.promql import scan
from tests.unit.dashboards.reading import DASHBOARD_FILES, RULE_FILES, read_rules

RULES = read_rules()
ALERTS = [rule for rule in RULES if rule.kind == "alert"]
RECORDED = {rule.name for rule in RULES if rule.kind == "record"}
TEST_FILES = sorted((Path(__file__).parent / "rules").glob("*.test.yaml"))
RUNBOOK = Path(__file__).parents[3] / "docs" / "dashboards.md"
WANTED_ALERTS = {
    "TesseraTimeToFirstTokenHigh",
    "TesseraErrorRateHigh",
    "TesseraKvPressure",
    "TesseraQueueGrowing",
    "TesseraReplicaRestarts",
    "TesseraPreemptionStorm",
    "TesseraExporterAbsent",
    "TesseraAttentionRooflineDrop",
    "TesseraHostOverheadHigh",
}
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
every_alert = pytest.mark.parametrize("rule", ALERTS, ids=lambda r: r.name)


def run_promtool(*arguments) -> subprocess.CompletedProcess:
    # Its garbage collector, if let, takes half of the time.
    environment = {**os.environ, "GOGC": "400"}
    return subprocess.run(
        [needed("promtool"), *arguments],
        text=True,
        capture_output=True,
        check=False,
        env=environment,
    )


def asked_of_promtool() -> list[tuple[str, bool]]:
    """Every expression that promtool's tests ask, and whether it has an answer there."""
    return [
        (case["expr"], bool(case["exp_samples"]))
        for file in TEST_FILES
        for test in yaml.safe_load(file.read_text())["tests"]
        for case in test.get("promql_expr_test", [])
    ]


def test_promtool_accepts_the_rules():
    checked = run_promtool("check", "rules", *RULE_FILES)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize("file", TEST_FILES, ids=lambda f: f.stem)
def test_promtool_finds_that_rules_do_what_they_say(file):
    tested = run_promtool("test", "rules", file)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_every_wanted_alert_is_there():
    assert {rule.name for rule in ALERTS} >= WANTED_ALERTS


def test_names_are_unique():
    assert len({rule.name for rule in RULES}) == len(RULES)


@every_rule
def test_a_rule_selects_metrics_and_labels_that_exist(rule):
    for selector in scan(rule.expression).selectors:
        if selector.metric in RECORDED:
            assert set(selector.matchers) <= {"phase"}
        else:
            assert set(selector.matchers) <= exported_metrics()[selector.metric].labels


@every_rule
def test_a_rule_takes_rates_of_counters_and_of_nothing_else(rule):
    for selector in scan(rule.expression).selectors:
        metric = exported_metrics().get(selector.metric)
        is_rate = selector.functions[-1:] in (("rate",), ("increase",))
        assert is_rate == (metric is not None and metric.kind != "gauge"), selector.text


@every_rule
def test_a_rule_keeps_the_service_apart(rule):
    """Without `job` two services on one Prometheus would be averaged into one."""
    if rule.name != "TesseraExporterAbsent" and "tessera_" in rule.expression:
        uses = scan(rule.expression)
        assert "job" in uses.grouping_labels or all(
            selector.metric in RECORDED for selector in uses.selectors
        )


@every_rule
def test_codes_that_a_rule_names_exist(rule):
    known = {code.value for code in ApiErrorCode}
    for selector in scan(rule.expression).selectors:
        for label in {"code", "reason"} & selector.matchers.keys():
            assert set(selector.matchers[label][1].strip('"').split("|")) <= known


def test_every_recording_rule_has_a_test():
    tested = {
        name for expr, _ in asked_of_promtool() for name in re.findall(r"[a-z_]+:\S+?:\w+", expr)
    }
    assert tested >= RECORDED


@every_alert
def test_an_alert_is_tested_where_it_fires_and_where_it_does_not(rule):
    outcomes = {has_answer for expr, has_answer in asked_of_promtool() if f'"{rule.name}"' in expr}
    assert outcomes == {True, False}


@every_alert
def test_an_alert_waits_and_says_what_is_wrong_and_where_to_read_on(rule):
    assert rule.raw["for"]
    assert rule.raw["labels"]["severity"] in ("critical", "warning")
    notes = rule.raw["annotations"]
    assert notes["summary"]
    assert len(notes["description"]) > 40
    assert notes["runbook_url"] == f"docs/dashboards.md#{rule.name.lower()}"
    assert f"### {rule.name}\n" in RUNBOOK.read_text()


def test_dashboards_do_not_depend_on_recording_rules():
    for file in DASHBOARD_FILES:
        assert not any(name in file.read_text() for name in RECORDED)
