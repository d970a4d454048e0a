"""Raylets as child processes of this one, the applications on them, and how parts are killed.

One raylet stands for one machine. Every process of the cluster is a descendant of this process, so
nothing else on the machine can be hit. Knows no client.
"""

import os
import random
import signal
import time
from collections.abc import Callable

import psutil
import ray
from ray import serve
from ray.cluster_utils import Cluster

from service.app import build_app
from service.engine_factory import create_engine
from tests.fakes.engine_factory import FakeEngineFactory
from tests.integration.chaos.applications import VOCAB_SIZE, Application
from tests.integration.chaos.kills import Kill, KillKind

OBJECT_STORE_BYTES = 80 << 20
CPUS_PER_NODE = 2
_NEVER_LEAVES_S = 15.0
_SUCCESSOR_COMES_S = 60.0
_LOOK_S = 0.05
_TITLES = {
    KillKind.CONTROLLER: "ServeController",
    KillKind.REGISTRY: "RegistryActor",
    KillKind.METRICS: "ExporterActor",
    KillKind.RANK: "RankProcess",
    KillKind.STOP_RANK: "RankProcess",
}
_STOPS = (KillKind.STOP, KillKind.STOP_START, KillKind.STOP_RANK)


class ChaosCluster:
    """start(), then kill() again and again from one thread; shut_down() at the end."""

    def __init__(self, applications: list[Application], num_nodes: int, step_s: float) -> None:
        self._applications = applications
        self._num_nodes = num_nodes
        self._step_s = step_s
        self._seen: dict[int, psutil.Process] = {}
        self._stopped: set[int] = set()

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
            [self._target(one) for one in self._applications],
            wait_for_ingress_deployment_creation=False,
            wait_for_applications_running=False,
        )

    def _target(self, application: Application) -> serve.RunTarget:
        fake = FakeEngineFactory(step_s=self._step_s, vocab_size=VOCAB_SIZE)
        app = build_app(application.config, fake if application.is_fake else create_engine)
        return serve.RunTarget(app, name=application.name, route_prefix=f"/{application.name}")

    def shut_down(self) -> None:
        """Whatever is still there ends."""
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    def kill(
        self, kind: KillKind, rng: random.Random, on_kill: Callable[[Kill], None]
    ) -> Kill | None:
        """None if there is nothing of that kind right now. on_kill comes before the harm."""
        if kind is KillKind.RAYLET:
            return self._kill_node(rng, on_kill)
        if kind is KillKind.STOP_START:
            return self._kill_and_stop_successor(rng, on_kill)
        victims = self._candidates(kind)
        return self._harm(rng.choice(victims), kind, on_kill) if victims else None

    def _harm(
        self, victim: psutil.Process, kind: KillKind, on_kill: Callable[[Kill], None]
    ) -> Kill:
        record = Kill(kind, time.monotonic(), _title(victim))
        self._count(record, victim)
        on_kill(record)
        if kind in _STOPS:
            self._stopped.add(victim.pid)
            victim.send_signal(signal.SIGSTOP)
        else:
            victim.kill()
        return record

    def _kill_and_stop_successor(
        self, rng: random.Random, on_kill: Callable[[Kill], None]
    ) -> Kill | None:
        """None if no engine was there, or no other came for it."""
        known = {process.pid for process in self._candidates(KillKind.STOP)}
        if self.kill(KillKind.ENGINE, rng, on_kill) is None:
            return None
        end_s = time.monotonic() + _SUCCESSOR_COMES_S
        while time.monotonic() < end_s:
            for process in self._candidates(KillKind.STOP):
                if process.pid not in known:
                    return self._harm(process, KillKind.STOP_START, on_kill)
            time.sleep(_LOOK_S)
        return None

    def num_engines(self, application: Application) -> int:
        """Live engine replicas, without those that were stopped."""
        wanted = f"ServeReplica:{application.name}:Engine"
        return sum(wanted in _title(one) for one in self._processes() if not self._is_out(one))

    def stopped(self) -> list[str]:
        """Processes that were stopped and are still there."""
        left = [self._seen[pid] for pid in sorted(self._stopped) if _is_running(self._seen[pid])]
        return [f"{one.pid} {_title(one)}" for one in left]

    def orphans(self) -> list[str]:
        """Processes that the cluster had and that no raylet holds any longer, stopped or not."""
        held = {process.pid for process in self._processes()}
        lost = [one for pid, one in self._seen.items() if pid not in held and _is_running(one)]
        return [f"{one.pid} {_title(one)}" for one in lost]

    def unwatched(self) -> list[str]:
        """Engines and ingresses that nobody would kill if they stood still."""
        replicas = [one for one in self._processes() if "ServeReplica:" in _title(one)]
        return [f"{one.pid} {_title(one)}" for one in replicas if not _is_watched(one)]

    def survivors(self) -> list[str]:
        """After shut_down(): what did not go, and is ended now."""
        running = [one for one in self._seen.values() if _is_running(one)]
        _, left = psutil.wait_procs(running, timeout=_NEVER_LEAVES_S)
        titles = [f"{one.pid} {_title(one)}" for one in left if _is_running(one)]
        for one in left:
            one.kill()
        return titles

    def _processes(self) -> list[psutil.Process]:
        found = psutil.Process().children(recursive=True)
        for process in found:
            self._seen.setdefault(process.pid, process)
        return found

    def _is_out(self, process: psutil.Process) -> bool:
        return process.pid in self._stopped or not _is_running(process)

    def _candidates(self, kind: KillKind) -> list[psutil.Process]:
        if kind in (KillKind.ENGINE, KillKind.STOP):
            wanted = [f"ServeReplica:{one.name}:Engine" for one in self._applications]
        elif kind is KillKind.INGRESS:
            wanted = [f"ServeReplica:{one.name}:Ingress" for one in self._applications]
        else:
            wanted = [_TITLES[kind]]
        return [
            process
            for process in self._processes()
            if any(part in _title(process) for part in wanted)
            and not self._is_out(process)
            and (kind is not KillKind.STOP or _is_watched(process))
        ]

    def _add_node(self) -> None:
        self._cluster.add_node(num_cpus=CPUS_PER_NODE, object_store_memory=OBJECT_STORE_BYTES)

    def _kill_node(self, rng: random.Random, on_kill: Callable[[Kill], None]) -> Kill:
        node = rng.choice(sorted(self._cluster.worker_nodes, key=lambda one: one.unique_id))
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        doomed = [raylet, *raylet.children(recursive=True)]
        record = Kill(KillKind.RAYLET, time.monotonic(), f"raylet {raylet.pid}")
        for process in doomed:
            self._count(record, process)
        on_kill(record)
        for process in doomed:
            if _is_running(process):
                os.kill(process.pid, signal.SIGKILL)
        self._cluster.remove_node(node, allow_graceful=False)
        self._add_node()
        return record

    def _count(self, record: Kill, process: psutil.Process) -> None:
        """Add what dies with this process to the record."""
        title = _title(process)
        for application in self._applications:
            is_rank = "RankProcess" in title and record.kind is not KillKind.RAYLET
            if f"ServeReplica:{application.name}:Engine" in title or (
                is_rank and application.tp_size > 1
            ):
                record.num_engines[application.name] = (
                    record.num_engines.get(application.name, 0) + 1
                )
            elif f"ServeReplica:{application.name}:Ingress" in title:
                record.num_ingresses[application.name] = (
                    record.num_ingresses.get(application.name, 0) + 1
                )


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _is_watched(process: psutil.Process) -> bool:
    """Whether it runs code of ours; docs/operations.md says what stops before that comes to."""
    try:
        return any("silence_watch" in _title(child) for child in process.children())
    except psutil.Error:
        return False


def _is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
