"""Whether a kill leaves a live replica of every model: what the strict promise is conditional on.

An engine is live when every ingress is connected to it and it has not been stopped. Knows no
request.
"""

import time

from tests.integration.chaos.applications import Application
from tests.integration.chaos.healing import Healing, read_metric
from tests.integration.chaos.kills import Kill, KillKind
from tests.integration.chaos.processes import ClusterProcesses

MIN_LIVE = 2
# Metrics of the time before a kill are gone by then.
_FRESH_S = 2.0
_HARMLESS = (KillKind.CONTROLLER, KillKind.REGISTRY, KillKind.METRICS, KillKind.INGRESS)


class Spares:
    """May be asked from one thread, while nothing is being killed."""

    def __init__(self, cluster: ClusterProcesses, healing: Healing, kills: list[Kill]) -> None:
        self._cluster = cluster
        self._healing = healing
        self._kills = kills

    def allow(self, kind: KillKind) -> bool:
        """Whether a kill of that kind leaves at least one live engine of each application."""
        if kind in _HARMLESS:
            return True
        if self._kills and time.monotonic() - self._kills[-1].at_s < _FRESH_S:
            return False
        if kind is KillKind.RAYLET:  # takes all that is on a node
            return self._healing.look()
        if self._cluster.stopped():  # some that are connected may be these
            return False
        return all(_num_live(one) >= MIN_LIVE for one in self._cluster.applications)


def _num_live(application: Application) -> float:
    connected = read_metric(application, "tessera_connected_replicas")
    is_complete = len(connected) >= application.num_ingresses
    return min(connected) if is_complete else 0
