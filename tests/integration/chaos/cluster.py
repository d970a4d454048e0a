"""Raylets as child processes of this one, and the applications on them.

One raylet stands for one machine. Knows no client.
"""

import os
import random
import signal
import time
from collections.abc import Callable
from typing import Any

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from service.app import build_app
from service.deployments.engine_factory import create_engine
from tests.fakes.engine_factory import FakeEngineFactory
from tests.integration.chaos.applications import VOCAB_SIZE, Application
from tests.integration.chaos.kills import Kill, KillKind
from tests.integration.chaos.processes import ClusterProcesses, is_running

OBJECT_STORE_BYTES = 80 << 20
CPUS_PER_NODE = 2


class ChaosCluster(ClusterProcesses):
    """A head and num_nodes others. step_s: pace of the fake engine, seconds a token."""

    def __init__(self, applications: list[Application], num_nodes: int, step_s: float) -> None:
        super().__init__(applications)
        self._num_nodes = num_nodes
        self._step_s = step_s

    def start(self) -> None:
        head = {"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES}
        self._cluster = Cluster(
            initialize_head=True, head_node_args=head | {"include_dashboard": False}
        )
        for _ in range(self._num_nodes):
            self._add_node()
        ray.init(address=self._cluster.address, log_to_driver=False)
        serve.start(proxy_location="Disabled")
        serve.run_many(
            [self._target(one) for one in self.applications],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _target(self, application: Application) -> serve.RunTarget:
        fake = FakeEngineFactory(step_s=self._step_s, vocab_size=VOCAB_SIZE)
        app = build_app(application.config, fake if application.is_fake else create_engine)
        return serve.RunTarget(app, name=application.name, route_prefix=f"/{application.name}")

    def shut_down(self) -> None:
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    def kill(
        self, kind: KillKind, rng: random.Random, on_kill: Callable[[Kill], None]
    ) -> Kill | None:
        if kind is KillKind.RAYLET:
            return self._kill_node(rng, on_kill)
        return super().kill(kind, rng, on_kill)

    def _add_node(self) -> None:
        self._cluster.add_node(num_cpus=CPUS_PER_NODE, object_store_memory=OBJECT_STORE_BYTES)

    def _kill_node(self, rng: random.Random, on_kill: Callable[[Kill], None]) -> Kill | None:
        """None if every node holds all engines of an application: Serve may put them together."""
        nodes = sorted(self._cluster.worker_nodes, key=lambda one: one.unique_id)
        deaths = [(node, *self._death_of(node)) for node in nodes]
        spared = [death for death in deaths if self._leaves_an_engine(death[1])]
        if not spared:
            return None
        node, record, doomed = rng.choice(spared)
        on_kill(record)
        for process in doomed:
            if is_running(process):
                os.kill(process.pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)
        self._add_node()
        return record

    def _death_of(self, node: Any) -> tuple[Kill, list[psutil.Process]]:
        """The record of its kill, and the processes that would go with it."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        doomed = [raylet, *raylet.children(recursive=True)]
        record = Kill(KillKind.RAYLET, time.monotonic(), f"raylet {raylet.pid}")
        for process in doomed:
            self._count(record, process)
        return record, doomed

    def _leaves_an_engine(self, record: Kill) -> bool:
        return all(
            record.num_engines.get(one.name, 0) < one.num_replicas for one in self.applications
        )
