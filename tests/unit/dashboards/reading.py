"""The chart's dashboards and rules as values: panels with their queries, rules with expressions.

Knows Grafana's JSON and Prometheus' rule files, and what Grafana replaces in a query. Evaluates
nothing.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[3] / "helm" / "tessera"
DASHBOARD_FILES = sorted((CHART / "dashboards").glob("*.json"))
RULE_FILES = sorted((CHART / "rules").glob("*.yaml"))
_VARIABLE = re.compile(r"\$\{?([a-zA-Z_]+)\}?")
_LABEL_VALUES = re.compile(r"label_values\((?P<selector>.+),\s*(?P<label>\w+)\)")


@dataclass(frozen=True, slots=True)
class Query:
    """One PromQL expression of a panel, as it stands in the file. legend: Grafana's template."""

    expression: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel that shows data. raw: its JSON."""

    dashboard: str
    title: str
    kind: str
    unit: str
    queries: tuple[Query, ...]
    raw: Mapping[str, Any]

    @property
    def name(self) -> str:
        return f"{self.dashboard}/{self.title}"


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard file. raw: its JSON."""

    file: Path
    title: str
    panels: tuple[Panel, ...]
    raw: Mapping[str, Any]

    @property
    def annotations(self) -> list[Query]:
        return [Query(a["expr"], a["name"]) for a in self.raw["annotations"]["list"]]

    @property
    def variables(self) -> list[Mapping[str, Any]]:
        return list(self.raw["templating"]["list"])


@dataclass(frozen=True, slots=True)
class Rule:
    """kind: "record" or "alert". raw: the rule as it stands in the file."""

    kind: str
    name: str
    expression: str
    raw: Mapping[str, Any]


def read_dashboard(file: Path) -> Dashboard:
    raw = json.loads(file.read_text())
    panels = (_read_panel(file.stem, panel) for panel in raw["panels"] if panel["type"] != "row")
    return Dashboard(file, raw["title"], tuple(panels), raw)


def read_dashboards() -> list[Dashboard]:
    return [read_dashboard(file) for file in DASHBOARD_FILES]


def read_panels() -> list[Panel]:
    return [panel for dashboard in read_dashboards() for panel in dashboard.panels]


def read_rules() -> list[Rule]:
    return list(_rules())


def substitute(expression: str, values: Mapping[str, str]) -> str:
    """The expression with Grafana's variables replaced. Raises KeyError for one without a value."""
    return _VARIABLE.sub(lambda match: values[match.group(1)], expression)


def label_values(query: str) -> tuple[str, str]:
    """Selector and label of a variable's label_values(selector, label)."""
    match = _LABEL_VALUES.fullmatch(query)
    if match is None:
        raise ValueError(f"not label_values(selector, label): {query}")
    return match["selector"], match["label"]


def _read_panel(dashboard: str, raw: Mapping[str, Any]) -> Panel:
    unit = (
        raw["options"]["yAxis"]["unit"]
        if raw["type"] == "heatmap"
        else raw["fieldConfig"]["defaults"]["unit"]
    )
    queries = tuple(Query(target["expr"], target["legendFormat"]) for target in raw["targets"])
    return Panel(dashboard, raw["title"], raw["type"], unit, queries, raw)


def _rules() -> Iterator[Rule]:
    for file in RULE_FILES:
        for group in yaml.safe_load(file.read_text())["groups"]:
            for raw in group["rules"]:
                kind = "alert" if "alert" in raw else "record"
                yield Rule(kind, raw[kind], raw["expr"], raw)
