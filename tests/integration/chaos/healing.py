"""Whether every application is whole, by its metrics and its processes; when each kill was healed.

Knows no request.
"""

import time

import httpx

from tests.integration.chaos.applications import Application
from tests.integration.chaos.cluster import ChaosCluster
from tests.integration.chaos.kills import Kill

_TIMEOUT_S = 2.0
_STILL_S = 1.0


class Healing:
    """look() as often as you like, from one thread."""

    def __init__(
        self, cluster: ChaosCluster, applications: list[Application], kills: list[Kill]
    ) -> None:
        self._cluster = cluster
        self._applications = applications
        self._kills = kills
        self._whole_since_s: float | None = None

    def look(self) -> bool:
        """Whether all is whole, and has been for a moment; notes it with the kills before."""
        now_s = time.monotonic()
        if self._cluster.has_stopped() or not all(map(self._is_whole, self._applications)):
            self._whole_since_s = None
            return False
        if self._whole_since_s is None:
            self._whole_since_s = now_s
        for kill in self._kills:
            is_before = kill.at_s < self._whole_since_s - _STILL_S
            if kill.healed_s is None and is_before:
                kill.healed_s = self._whole_since_s
        return now_s - self._whole_since_s >= _STILL_S

    def _is_whole(self, application: Application) -> bool:
        if self._cluster.num_engines(application) != application.num_replicas:
            return False
        connected = read_metric(application, "tessera_connected_replicas")
        return connected == [float(application.num_replicas)] * application.num_ingresses


def read_metric(application: Application, name: str) -> list[float]:
    """The value of each series of that name; empty while nobody can be asked."""
    try:
        text = httpx.get(application.metrics_url, timeout=_TIMEOUT_S).text
    except httpx.TransportError:
        return []
    lines = (line for line in text.splitlines() if line.startswith(name + "{"))
    return [float(line.rsplit(" ", 1)[1]) for line in lines]
