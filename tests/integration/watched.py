"""What a Prometheus saw of a service, asked as Grafana asks: variables filled in, over a range."""

import math
from dataclasses import dataclass, replace
from typing import Self

from tests.integration.prometheus_server import Prometheus
from tests.unit.dashboards.reading import label_values, read_dashboards, substitute

RATE_INTERVAL = "15s"
STEP_S = 2.0


@dataclass(frozen=True)
class Watched:
    """Between two Unix times. variables: what Grafana would fill in."""

    prometheus: Prometheus
    start_s: float
    end_s: float
    variables: dict[str, str]

    def until(self, end_s: float) -> Self:
        return replace(self, end_s=end_s)

    def over_time(self, expression: str) -> list[dict]:
        filled = substitute(expression, self.variables)
        return self.prometheus.query_range(filled, self.start_s, self.end_s, STEP_S)

    def at_the_end(self, expression: str) -> list[dict]:
        return self.prometheus.query(substitute(expression, self.variables), self.end_s)


def watch(prometheus: Prometheus, start_s: float) -> Watched:
    """With everything selected: of each variable all values, one after the other."""
    values = {"__rate_interval": RATE_INTERVAL}
    for variable in read_dashboards()[0].variables[1:]:
        selector, label = label_values(variable["query"]["query"])
        found = prometheus.label_values(substitute(selector, values), label)
        assert found, variable["query"]["query"]
        values[variable["name"]] = "|".join(found)
    return Watched(prometheus, start_s, start_s, values)


def finite_values(series: list[dict]) -> list[float]:
    """All numbers of a query's answer, without NaN and infinities."""
    samples = [sample for one in series for sample in one.get("values") or [one["value"]]]
    return [float(value) for _, value in samples if math.isfinite(float(value))]
