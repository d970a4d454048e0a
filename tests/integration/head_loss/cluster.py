"""A head, workers and Redis; the applications deployed through the head's dashboard.

The head comes back by itself some time after it was killed, as a container does. Knows no client.
"""

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from tests.integration.chaos.applications import Application
from tests.integration.chaos.kills import Kill, KillKind
from tests.integration.chaos.processes import ClusterProcesses
from tests.integration.head_loss.nodes import (
    DASHBOARD_PORT,
    GCS_PORT,
    HOST,
    RECONNECT_TIMEOUT_S,
    WORKER_RESOURCES,
    Head,
    RayNode,
    Redis,
    is_listening,
)

CPUS_PER_NODE = 4
_URL = f"http://{HOST}:{DASHBOARD_PORT}/api/serve/applications/"
_START_TIMEOUT_S = 60.0
_HTTP_TIMEOUT_S = 5.0
_LOOK_S = 0.1
# An ingress asks for no CPU: on the head it would be lost with it.
_ON_WORKERS = {"resources": dict.fromkeys(WORKER_RESOURCES, 1)}


class HeadLossCluster(ClusterProcesses):
    """away_s: from the head's death to the start of its successor. step_s: as in the chaos run."""

    def __init__(
        self,
        applications: list[Application],
        redis: Redis,
        num_workers: int,
        away_s: float,
        step_s: float,
    ) -> None:
        super().__init__(applications)
        self._redis = redis
        self._away_s = away_s
        self._step_s = step_s
        self._head = Head(has_redis=True)
        settings = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(RECONNECT_TIMEOUT_S)}
        self._workers = [
            RayNode(f"worker{number}", number, CPUS_PER_NODE, settings)
            for number in range(1, num_workers + 1)
        ]
        self._is_over = threading.Event()
        self._successor: threading.Thread | None = None

    def start(self) -> None:
        self._redis.start()
        self._head.start()
        _wait_until(lambda: is_listening(GCS_PORT))
        for worker in self._workers:
            worker.start()
        _wait_until(self._has_dashboard)
        self._deploy()

    def shut_down(self) -> None:
        self._is_over.set()
        if self._successor is not None:
            self._successor.join()
        self._processes()
        for one in (*self._workers, self._head, self._redis):
            one.remove()

    def kill(
        self, kind: KillKind, rng: random.Random, on_kill: Callable[[Kill], None]
    ) -> Kill | None:
        if kind is not KillKind.HEAD:
            return super().kill(kind, rng, on_kill)
        if not self._head.is_running:
            return None
        record = Kill(kind, time.monotonic(), f"head, away for {self._away_s:g} s")
        on_kill(record)
        self._head.remove()
        self._successor = threading.Thread(target=self._replace_head)
        self._successor.start()
        return record

    def missing(self) -> list[str]:
        if not self._head.is_running:
            return ["the head is away"]
        try:
            answer = httpx.get(_URL, timeout=_HTTP_TIMEOUT_S)
        except httpx.HTTPError as error:
            return [f"the dashboard does not answer: {error!r}"]
        if answer.status_code != httpx.codes.OK:
            return [f"Serve's controller does not answer: {answer.text[:200]}"]
        return list(_not_running(answer.json()["applications"], self.applications))

    def _replace_head(self) -> None:
        """As the kubelet does: again, if one ends before it serves."""
        wait_s = self._away_s
        while not self._is_over.wait(wait_s):
            if self._has_dashboard():
                # KubeRay may hand the same configuration to a new head: nothing may come of it.
                self._deploy()
                return
            if not self._head.is_running:
                self._head.remove()
                self._head.start()
            wait_s = _LOOK_S

    def _has_dashboard(self) -> bool:
        try:
            return httpx.get(_URL, timeout=_HTTP_TIMEOUT_S).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def _deploy(self) -> None:
        """Raises httpx.HTTPStatusError if Serve refuses it."""
        applications = [
            {
                "name": one.name,
                "route_prefix": f"/{one.name}",
                "import_path": "tests.integration.head_loss.deployed:build",
                "args": {"application": one.name, "step_s": self._step_s},
                "deployments": [
                    {"name": "Ingress", "ray_actor_options": {"num_cpus": 0, **_ON_WORKERS}}
                ],
            }
            for one in self.applications
        ]
        config = {"proxy_location": "Disabled", "applications": applications}
        httpx.put(_URL, json=config, timeout=_START_TIMEOUT_S).raise_for_status()


def _not_running(found: dict[str, Any], wanted: list[Application]) -> list[str]:
    states = {one.name: found.get(one.name, {}).get("status", "unknown") for one in wanted}
    return [f"Serve says {name} is {state}" for name, state in states.items() if state != "RUNNING"]


def _wait_until(condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + _START_TIMEOUT_S
    while not condition():
        if time.monotonic() > end_s:
            raise TimeoutError("the head does not start")
        time.sleep(_LOOK_S)
