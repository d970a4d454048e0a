"""The named Ray actors: the registry of replicas, the exporter of metrics and the store of
responses, which is in response_store_actor.py.

Thin shells around plain classes. The first two are control plane: no token and no client's text
comes here.
Detached, so that they outlive whichever process created them first; close_control_plane() ends
them.
"""

import asyncio
import sys
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import ray
from ray._common.constants import HEAD_NODE_RESOURCE_NAME
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from service.adapters.lease import FolderClaim, FolderLease
from service.adapters.table import AdapterEntry, AdapterTable, action_of
from service.autoscaling.load import DemandReport, ModelLoad, ReplicaLoadReport
from service.channel.address import ReplicaAddress
from service.deployments.registry import (
    IngressReport,
    RegistryView,
    ReplicaRegistry,
    ServiceStatus,
    StartFailure,
    StartProgress,
)
from service.listening import MetricsSettings
from service.observability.exporter import MetricsExporter
from service.observability.live import live_state
from service.security.audit import AuditLog

NAMESPACE = "tessera"
ANNOUNCE_INTERVAL_S = 1.0
REGISTRY_EXPIRE_AFTER_S = 5.0
_WATCH_TURN_S = 0.5
# Of the one that Ray counts on its head node; there is room for a thousand services.
_ANY_SHARE = 0.001

# Handles of actors have no static type in Ray.
ActorHandle = Any


class RegistryActor:
    """ReplicaRegistry behind an asynchronous actor, with a long poll.

    Administrative calls go to the audit log: this process's standard error, which Ray keeps.
    """

    def __init__(self) -> None:
        self._registry = ReplicaRegistry(REGISTRY_EXPIRE_AFTER_S)
        self._audit = AuditLog(sys.stderr)
        self._changed = asyncio.Event()

    async def announce(self, address: ReplicaAddress) -> None:
        self._registry.announce(address)
        self._changed.set()

    async def withdraw(self, replica_id: str) -> None:
        self._registry.withdraw(replica_id)
        self._changed.set()

    async def begin_drain(self, by: str) -> None:
        self._audit.record("begin_drain", by)
        self._registry.begin_drain()
        self._changed.set()

    async def end_drain(self, by: str) -> None:
        self._audit.record("end_drain", by)
        self._registry.end_drain()
        self._changed.set()

    async def report_progress(self, progress: StartProgress) -> None:
        self._registry.report_progress(progress)

    async def report_failure(self, failure: StartFailure) -> None:
        self._registry.report_failure(failure)

    async def report_ingress(self, report: IngressReport) -> None:
        self._registry.report_ingress(report)

    async def report_load(self, report: ReplicaLoadReport) -> None:
        self._registry.loads.report_load(report)

    async def report_demand(self, report: DemandReport) -> None:
        self._registry.loads.report_demand(report)

    async def report_start_failure(self, key: str) -> None:
        self._registry.loads.report_start_failure(key)
        self._changed.set()

    async def set_adapter(
        self, entry: AdapterEntry, known: AdapterTable, action: str, by: str
    ) -> AdapterTable:
        self._audit.record(action, by)
        table = self._registry.set_adapters([entry], known)
        self._changed.set()
        return table

    async def lease_folder(self, claim: FolderClaim) -> FolderLease:
        """Whether this ingress is to watch a model's folder of adapters now."""
        return self._registry.folders.take(claim)

    async def set_folder_adapters(
        self, entries: Sequence[AdapterEntry], known: AdapterTable, by: str
    ) -> AdapterTable:
        """What a watched folder has to say. Names of which another one has said something
        since are passed over: the ingress decides anew, by the table that it gets."""
        news = self._registry.adapter_news(entries, known)
        for entry in news:
            self._audit.record(action_of(entry), by)
        if news:
            self._registry.set_adapters(news, known)
        self._changed.set()
        return self._registry.adapters

    async def restore_adapters(self, table: AdapterTable) -> None:
        self._registry.restore_adapters(table)
        self._changed.set()

    async def audit(self, action: str, by: str) -> None:
        """Of a call that does not come here."""
        self._audit.record(action, by)

    async def load_for_policy(self, key: str, can_wake: bool) -> ModelLoad:
        """A model's load; asking for it says that a policy is there, and what it may do."""
        self._registry.loads.report_policy(key, can_wake=can_wake)
        return self._registry.loads.load(key)

    async def status(self) -> ServiceStatus:
        return self._registry.status()

    async def watch(self, known_version: int, timeout_s: float) -> RegistryView:
        """The view as soon as its version differs from known_version, at the latest at timeout."""
        end_s = time.monotonic() + timeout_s
        while True:
            self._changed.clear()
            view = self._registry.view()
            if view.version != known_version or time.monotonic() >= end_s:
                return view
            try:
                await asyncio.wait_for(self._changed.wait(), _WATCH_TURN_S)
            except TimeoutError:
                continue


class ExporterActor:
    """MetricsExporter behind an actor."""

    def __init__(self, host: str, port: int, expire_after_s: float) -> None:
        self._exporter = MetricsExporter(host, port, expire_after_s)

    def push(self, snapshot: bytes) -> None:
        self._exporter.push(snapshot)

    def text(self) -> bytes:
        return self._exporter.text()

    def live(self) -> bytes:
        """A LiveState as JSON."""
        return msgspec.json.encode(live_state(self._exporter.alive()))

    def port(self) -> int:
        return self._exporter.port


def registry_name(app_name: str) -> str:
    return f"{app_name}-registry"


def exporter_name(app_name: str) -> str:
    return f"{app_name}-metrics"


def store_name(app_name: str) -> str:
    return f"{app_name}-responses"


def get_registry(app_name: str) -> ActorHandle:
    """The application's registry, created by whoever asks first, there."""
    # Any strategy of its own keeps the actor out of the placement group of the replica that creates
    # it, which would otherwise capture it and take it along at its end.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    return get_or_create(RegistryActor, registry_name(app_name), {"scheduling_strategy": here})


def get_exporter(app_name: str, settings: MetricsSettings) -> ActorHandle:
    """The application's exporter on Ray's head node, created by whoever asks first.

    There, because whoever scrapes must know where: of all nodes only the head can be named, and it
    is there as long as the cluster.
    """
    return get_or_create(
        ExporterActor,
        exporter_name(app_name),
        on_the_head(),
        settings.host,
        settings.port,
        settings.expire_after_s,
    )


def on_the_head() -> dict[str, Any]:
    """Options of an actor."""
    # "DEFAULT" is a strategy too: see get_registry().
    return {"scheduling_strategy": "DEFAULT", "resources": {HEAD_NODE_RESOURCE_NAME: _ANY_SHARE}}


def close_control_plane(app_name: str) -> None:
    """End the actors, those that exist."""
    for name in (registry_name(app_name), exporter_name(app_name), store_name(app_name)):
        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
        except ValueError:
            continue
        ray.kill(actor)


def get_or_create(
    actor_class: type, name: str, placement: dict[str, Any], *args: Any
) -> ActorHandle:
    return (
        ray.remote(actor_class)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            **placement,
        )
        .remote(*args)
    )
