"""Whether every application is whole, by its metrics and its processes; when each kill was healed.

Says what is missing. Knows no request.
"""

import time
from collections.abc import Iterator

import httpx

from tests.integration.chaos.applications import Application
from tests.integration.chaos.kills import Kill
from tests.integration.chaos.processes import ClusterProcesses

_TIMEOUT_S = 2.0
_STILL_S = 1.0


class Healing:
    """look() as often as you like, from one thread. missing: what it found, "" if all is whole."""

    def __init__(self, cluster: ClusterProcesses, kills: list[Kill]) -> None:
        self._cluster = cluster
        self._kills = kills
        self._whole_since_s: float | None = None
        self.missing = ""

    def look(self) -> bool:
        """Whether all is whole, and has been for a moment; notes it with the kills before."""
        now_s = time.monotonic()
        self.missing = "; ".join(self._look_for_missing())
        if self.missing:
            self._whole_since_s = None
            return False
        if self._whole_since_s is None:
            self._whole_since_s = now_s
        for kill in self._kills:
            is_before = kill.at_s < self._whole_since_s - _STILL_S
            if kill.healed_s is None and is_before:
                kill.healed_s = self._whole_since_s
        return now_s - self._whole_since_s >= _STILL_S

    def _look_for_missing(self) -> Iterator[str]:
        for stopped in self._cluster.stopped():
            yield f"{stopped} was stopped and is still there"
        yield from self._cluster.missing()
        for application in self._cluster.applications:
            num_engines = self._cluster.num_engines(application)
            if num_engines != application.num_replicas:
                yield f"{application.name} has {num_engines} engines"
            connected = read_metric(application, "tessera_connected_replicas")
            if connected != [float(application.num_replicas)] * application.num_ingresses:
                yield f"ingresses of {application.name} are connected to {connected} engines"


def read_metric(application: Application, name: str) -> list[float]:
    """The value of each series of that name; empty while nobody can be asked."""
    try:
        text = httpx.get(application.metrics_url, timeout=_TIMEOUT_S).text
    except httpx.TransportError:
        return []
    lines = (line for line in text.splitlines() if line.startswith(name + "{"))
    return [float(line.rsplit(" ", 1)[1]) for line in lines]
