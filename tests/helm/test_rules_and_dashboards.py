"""The chart's rules and dashboards as they reach Prometheus and Grafana."""

import json
import re
import subprocess

import pytest
import yaml

from tests.helm.objects import of_kind, one_of
from tests.helm.rendering import CHART, chart_with_stub_files
from tests.programs import needed
from tests.unit.dashboards.reading import read_rules

DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())["monitoring"]
ALERTS = {rule.name: rule.expression for rule in read_rules() if rule.kind == "alert"}
THRESHOLD = re.compile(r"\(([0-9.]+)\)")
RULES = {"monitoring": {"rules": True}}
BOARDS = {"monitoring": {"dashboards": {"enabled": True}}}


def rules_of(objects):
    groups = one_of(objects, "PrometheusRule")["spec"]["groups"]
    return {
        rule.get("alert", rule.get("record")): rule for group in groups for rule in group["rules"]
    }


def boards_of(objects):
    return {
        name: json.loads(text)
        for one in of_kind(objects, "ConfigMap")
        if one["metadata"]["labels"].get("grafana_dashboard") == "1"
        for name, text in one["data"].items()
    }


def test_the_values_know_every_threshold_of_the_files():
    found = {name: THRESHOLD.findall(expression) for name, expression in ALERTS.items()}
    assert all(len(numbers) <= 1 for numbers in found.values())
    given = {name: float(numbers[0]) for name, numbers in found.items() if numbers}
    assert given == DEFAULTS["thresholds"]


def test_with_the_defaults_the_rules_are_those_of_the_files(renderer):
    rules = rules_of(renderer.render([RULES]))
    for rule in read_rules():
        if rule.name != "TesseraExporterAbsent":
            assert rules[rule.name] == rule.raw, rule.name


@pytest.mark.parametrize("name", DEFAULTS["thresholds"])
def test_a_threshold_is_the_values(name, renderer):
    objects = renderer.render([RULES, {"monitoring": {"thresholds": {name: 0.625}}}])
    for other, rule in rules_of(objects).items():
        if other == name:
            assert rule["expr"] == THRESHOLD.sub("(0.625)", ALERTS[name])
        elif other in ALERTS and other != "TesseraExporterAbsent":
            assert rule["expr"] == ALERTS[other]


def test_runbooks_are_where_the_values_say(renderer):
    base = "https://wiki.example.com/tessera"
    rules = rules_of(renderer.render([RULES, {"monitoring": {"runbookBase": base}}]))
    for name in ALERTS:
        assert rules[name]["annotations"]["runbook_url"] == f"{base}#{name.lower()}"


ALERT_TEST = """
rule_files: [rules.yaml]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'tessera_live_requests{namespace="other", job="other/a"}', values: '1x30'}
      - {series: 'tessera_connected_replicas{namespace="other", job="other/a"}', values: '0x30'}
    alert_rule_test:
      - alertname: TesseraNoReplica
        eval_time: 10m
        exp_alerts: [{exp_labels: {severity: critical, namespace: other, job: other/a}}]
      - alertname: TesseraExporterAbsent
        eval_time: 10m
        exp_alerts: [{exp_labels: {severity: critical, namespace: mine}}]
"""


def test_alerts_keep_the_namespace(renderer, tmp_path):
    """Alertmanager routes by it; an exporter of another namespace does not stand for this one's."""
    promtool = needed("promtool")
    objects = renderer.render([RULES], flags=["--namespace", "mine"])
    spec = one_of(objects, "PrometheusRule")["spec"]
    for group in spec["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(spec))
    (tmp_path / "test.yaml").write_text(ALERT_TEST)
    done = subprocess.run(
        [promtool, "test", "rules", tmp_path / "test.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_aggregation_of_a_rule_keeps_namespace_and_job():
    for rule in read_rules():
        for labels in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule.expression):
            assert labels.startswith("namespace, job"), rule.name


def test_two_releases_have_dashboards_of_their_own(renderer):
    seen = []
    for flags, name in (([], "tessera"), (["--namespace", "b"], "tessera"), ([], "other")):
        given = [BOARDS, {"fullnameOverride": name}]
        seen += boards_of(renderer.render(given, flags=flags)).values()
    for key in ("uid", "title"):
        assert len({board[key] for board in seen}) == len(seen)
    assert all(len(board["uid"]) <= 40 for board in seen)


def test_the_real_dashboards_are_carried_whole_but_for_their_names(renderer):
    carried = boards_of(renderer.render([BOARDS]))
    files = {path.name: json.loads(path.read_text()) for path in CHART.glob("dashboards/*.json")}
    assert set(carried) == set(files)
    for name, board in carried.items():
        assert board.pop("title") == f"{files[name].pop('title')} (default/tessera)"
        assert board.pop("uid").partition("-")[2] == files[name].pop("uid").partition("-")[2]
        assert board == files[name]


@pytest.mark.parametrize("count", [0, 1, 3])
def test_each_dashboard_becomes_one_config_map(count, renderer, tmp_path):
    chart = chart_with_stub_files(tmp_path)
    (chart / "dashboards" / "overview.json").unlink()
    for index in range(count):
        (chart / "dashboards" / f"Board_{index}.json").write_text('{"title": "{{ not a value }}"}')
    boards = [
        one
        for one in of_kind(renderer.render([BOARDS], chart), "ConfigMap")
        if one["metadata"]["labels"].get("grafana_dashboard") == "1"
    ]
    assert [one["metadata"]["name"] for one in boards] == [
        f"tessera-dashboard-board-{index}" for index in range(count)
    ]
    for one in boards:
        (text,) = one["data"].values()
        assert json.loads(text) == {"title": "{{ not a value }}"}
