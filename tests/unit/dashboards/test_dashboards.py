"""Dashboards that operators edit by hand: what holds for every one of them and every panel."""

import json
import re
import subprocess
from typing import get_args

import pytest

from service.config import ServeConfig
from service.errors import ApiErrorCode
from service.routing.policy import RoutingReason
from tests.programs import needed
from tests.unit.dashboards.catalogue import PROMETHEUS_METRICS, exported_metrics
from tests.unit.dashboards.promql import Selector, scan
from tests.unit.dashboards.reading import (
    CHART,
    label_values,
    read_dashboards,
    read_panels,
    substitute,
)
from workers.engine.observer import Phase
from workers.engine.protocol import FinishReason

DASHBOARDS = read_dashboards()
PANELS = read_panels()
DOCUMENT = CHART.parents[1] / "docs" / "dashboards.md"
FILES = {"overview", "latency", "attention", "kv-cache", "router", "ray-overhead"}
VARIABLES = ["datasource", "model", "job", "replica"]
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
EXAMPLE = {"__rate_interval": "1m", "job": "a", "model": "m", "replica": "r"}
SERVICE_FILTER = {"job": ("=~", '"$job"')}
# "or none": what is refused before a model is known counts for all of them.
INGRESS_FILTER = SERVICE_FILTER | {"model": ("=~", '"$model|"')}
# The variable `replica` lists engines of the chosen models only.
ENGINE_FILTER = SERVICE_FILTER | {"replica": ("=~", '"$replica"')}
FILTERS = {"ingress": INGRESS_FILTER, "engine": ENGINE_FILTER, "autoscaler": INGRESS_FILTER}
every_dashboard = pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda d: d.file.stem)
every_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda p: p.name)


def selectors(panel) -> list[Selector]:
    return [s for query in panel.queries for s in scan(query.expression).selectors]


def test_the_six_dashboards_are_there():
    assert {dashboard.file.stem for dashboard in DASHBOARDS} == FILES


def test_uids_and_titles_are_unique():
    assert len({dashboard.raw["uid"] for dashboard in DASHBOARDS}) == len(FILES)
    assert len({dashboard.title for dashboard in DASHBOARDS}) == len(FILES)


@every_dashboard
def test_a_dashboard_is_formatted_as_grafana_writes_it(dashboard):
    text = json.dumps(dashboard.raw, indent=2, ensure_ascii=False) + "\n"
    assert dashboard.file.read_text() == text


@every_dashboard
def test_a_dashboard_has_the_common_variables(dashboard):
    assert [variable["name"] for variable in dashboard.variables] == VARIABLES
    for variable in dashboard.variables[1:]:
        selector, label = label_values(variable["query"]["query"])
        (found,) = scan(selector).selectors
        assert label in exported_metrics()[found.metric].labels
        assert variable["datasource"] == DATASOURCE
        assert variable["includeAll"]
        assert variable["multi"]


@every_dashboard
def test_panels_have_ids_of_their_own_and_do_not_overlap(dashboard):
    panels = dashboard.raw["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken
        taken |= cells


@every_dashboard
def test_a_dashboard_links_to_its_siblings_with_its_variables(dashboard):
    (link,) = dashboard.raw["links"]
    assert link["tags"] == dashboard.raw["tags"] == ["tessera"]
    assert link["includeVars"]
    assert link["keepTime"]


@every_panel
def test_a_panel_says_what_to_do_and_in_which_unit(panel):
    assert panel.unit
    assert len(panel.raw["description"]) > 80
    assert panel.raw["description"].endswith(".")


@every_panel
def test_a_panel_asks_the_chosen_data_source(panel):
    assert panel.raw["datasource"] == DATASOURCE
    assert all(target["datasource"] == DATASOURCE for target in panel.raw["targets"])
    refs = [target["refId"] for target in panel.raw["targets"]]
    assert len(set(refs)) == len(refs) > 0


@every_panel
def test_a_panel_selects_metrics_and_labels_that_exist(panel):
    metrics = exported_metrics()
    for query in panel.queries:
        found = scan(query.expression)
        assert found.selectors
        usable = {"le"} if panel.kind == "heatmap" else set()
        for selector in found.selectors:
            if selector.metric in PROMETHEUS_METRICS:
                usable |= {"job", "instance"}
                continue
            assert set(selector.matchers) <= metrics[selector.metric].labels
            usable |= metrics[selector.metric].labels
        assert found.grouping_labels <= usable
        assert set(re.findall(r"{{(\w+)}}", query.legend)) <= found.grouping_labels


@every_panel
def test_a_panel_follows_the_variables(panel):
    for selector in selectors(panel):
        metric = exported_metrics().get(selector.metric)
        wanted = SERVICE_FILTER if metric is None else FILTERS[metric.process]
        given = {k: v for k, v in selector.matchers.items() if k in ("job", "replica", "model")}
        assert given == wanted, selector.text


@every_panel
def test_counters_are_shown_as_rates_and_gauges_as_they_are(panel):
    for selector in selectors(panel):
        metric = exported_metrics().get(selector.metric)
        if metric is None or metric.kind == "gauge":
            assert selector.range is None
        else:
            assert selector.functions[-1] in ("rate", "increase"), selector.text
            assert selector.range == "$__rate_interval"


@every_panel
def test_buckets_end_in_a_quantile_or_a_heatmap(panel):
    for query in panel.queries:
        for selector in scan(query.expression).selectors:
            if selector.metric.endswith("_bucket"):
                assert "le" in scan(query.expression).grouping_labels
                assert panel.kind == "heatmap" or selector.functions[0] == "histogram_quantile"
    if panel.kind == "heatmap":
        assert [target["format"] for target in panel.raw["targets"]] == ["heatmap"]
        assert not panel.raw["options"]["calculate"]


@every_panel
def test_label_values_in_a_query_are_values_that_the_service_gives(panel):
    codes = {code.value for code in ApiErrorCode}
    reasons = {value.value for kind in (RoutingReason, FinishReason) for value in kind}
    known = {"reason": codes | reasons, "code": codes, "phase": set(get_args(Phase))}
    for selector in selectors(panel):
        for label, (_, value) in selector.matchers.items():
            if label in known:
                assert set(value.strip('"').split("|")) <= known[label]


def assert_settings_exist(text):
    sections = {"router", "admission", "replica", "metrics", "engine", "channel", "limits"}
    for section, key in re.findall(r"\b([a-z]+)\.([a-z_]+)\b", text):
        if section in sections:
            settings = ServeConfig.model_fields[section].annotation
            assert key in settings.model_fields, f"{section}.{key}"


@every_panel
def test_settings_that_a_description_names_exist(panel):
    assert_settings_exist(panel.raw["description"])


def test_settings_that_the_documentation_names_exist():
    text = DOCUMENT.read_text()
    assert_settings_exist(" ".join(re.findall(r"`([a-z]+\.[a-z_]+)`", text)))


def test_every_metric_of_the_service_is_on_some_dashboard():
    shown = {selector.metric for panel in PANELS for selector in selectors(panel)}
    shown = {re.sub("_(bucket|sum|count)$", "", name) for name in shown}
    exported = {re.sub("_(bucket|sum|count)$", "", name) for name in exported_metrics()}
    assert exported - shown == set()


def test_the_documentation_names_every_metric_and_shows_every_dashboard():
    text = DOCUMENT.read_text()
    for name in exported_metrics():
        assert re.search(rf"`{re.sub('_(bucket|sum|count)$', '', name)}`", text), name
    for dashboard in DASHBOARDS:
        assert f"](images/dashboard-{dashboard.file.stem}.png)" in text


def test_promtool_can_parse_every_query(tmp_path):
    promtool = needed("promtool")
    queries = [query for panel in PANELS for query in panel.queries]
    queries += [query for dashboard in DASHBOARDS for query in dashboard.annotations]
    rules = [
        {"record": f"panel:number_{i}", "expr": substitute(query.expression, EXAMPLE)}
        for i, query in enumerate(queries)
    ]
    file = tmp_path / "panels.json"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    checked = subprocess.run(
        [promtool, "check", "rules", file], text=True, capture_output=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
