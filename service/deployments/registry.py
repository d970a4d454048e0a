"""Which replicas exist and what the service as a whole is doing: the control plane's notice board.

Replicas announce themselves again and again; what falls silent is forgotten. Holds nothing that its
announcers would not tell a successor within a second. Knows no Ray and no sockets.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from service.adapters.lease import FolderLeases
from service.adapters.table import AdapterBoard, AdapterEntry, AdapterTable
from service.autoscaling.board import LoadBoard
from service.autoscaling.load import ModelAvailability
from service.channel.address import ReplicaAddress
from service.handler.task import Task

MAX_FAILURES = 8
START_EXPIRES_AFTER_S = 600.0
"""A starting replica speaks when it gets on, not steadily: some stages are long and silent."""


@dataclass(frozen=True, slots=True)
class RegistryView:
    """What an ingress acts upon. version changes whenever the rest does."""

    version: int
    replicas: tuple[ReplicaAddress, ...]
    is_draining: bool
    availability: tuple[ModelAvailability, ...] = ()
    adapters: AdapterTable = AdapterTable()


@dataclass(frozen=True, slots=True)
class StartProgress:
    """How far a starting replica of a model is: fraction in [0, 1] of the stage."""

    replica_id: str
    model: str
    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class StartFailure:
    """A process that cannot start, for a reason that another attempt does not change."""

    process_id: str
    message: str


@dataclass(frozen=True, slots=True)
class IngressReport:
    """What an ingress says of itself, and of its models that it has seen: what each is for."""

    ingress_id: str
    is_ready: bool
    is_draining: bool
    num_live_requests: int
    tasks: Mapping[str, Task] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServiceStatus:
    """What an operator's command shows."""

    num_replicas: int
    starting: tuple[StartProgress, ...]
    ingresses: tuple[IngressReport, ...]
    failures: tuple[StartFailure, ...] = ()


class ReplicaRegistry:
    """Single-threaded. expire_after_s: silence after which an announcer is forgotten."""

    def __init__(self, expire_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.loads = LoadBoard(clock)
        self._adapters = AdapterBoard()
        self.folders = FolderLeases(expire_after_s, clock)
        self._expire_after_s = expire_after_s
        self._clock = clock
        # A successor of this registry must not repeat a version that a watcher has seen.
        self._version = time.time_ns()
        self._is_draining = False
        self._replicas: dict[str, tuple[float, ReplicaAddress]] = {}
        self._starting: dict[str, tuple[float, StartProgress]] = {}
        self._failures: list[StartFailure] = []
        self._ingresses: dict[str, tuple[float, IngressReport]] = {}

    def announce(self, address: ReplicaAddress) -> None:
        """The replica runs at this address; to be repeated."""
        known = self._replicas.get(address.replica_id)
        self._replicas[address.replica_id] = (self._clock(), address)
        self._starting.pop(address.replica_id, None)
        if known is None or known[1] != address:
            self._version += 1

    def withdraw(self, replica_id: str) -> None:
        """The replica takes no new requests."""
        self.loads.forget(replica_id)
        if self._replicas.pop(replica_id, None) is not None:
            self._version += 1

    def begin_drain(self) -> None:
        """Every ingress refuses new requests from now on, for good."""
        self._is_draining = True
        self._version += 1

    def end_drain(self) -> None:
        """Ingresses that start from now on do not drain: for a new deployment."""
        self._is_draining = False
        self._failures.clear()
        self._version += 1

    def report_progress(self, progress: StartProgress) -> None:
        self._starting[progress.replica_id] = (self._clock(), progress)

    def report_failure(self, failure: StartFailure) -> None:
        """Kept until the next deployment, but no more than MAX_FAILURES."""
        self._failures = [*self._failures, failure][-MAX_FAILURES:]
        self._starting.pop(failure.process_id, None)

    def report_ingress(self, report: IngressReport) -> None:
        self._ingresses[report.ingress_id] = (self._clock(), report)

    def set_adapters(self, entries: Sequence[AdapterEntry], known: AdapterTable) -> AdapterTable:
        """known: what the ingress that asks was told last."""
        self._version += 1
        return self._adapters.set(entries, known)

    def adapter_news(
        self, entries: Sequence[AdapterEntry], known: AdapterTable
    ) -> tuple[AdapterEntry, ...]:
        """Those of whose names an ingress that was told `known` last knows the last word."""
        self.restore_adapters(known)
        return self._adapters.news(entries, known)

    @property
    def adapters(self) -> AdapterTable:
        return self._adapters.table

    def restore_adapters(self, table: AdapterTable) -> None:
        """What an ingress has been told by a registry that is gone."""
        if self._adapters.restore(table):
            self._version += 1

    def view(self) -> RegistryView:
        self._expire()
        replicas = tuple(address for _, address in self._replicas.values())
        return RegistryView(
            self._version + self.loads.version,
            replicas,
            self._is_draining,
            self.loads.availability(),
            self._adapters.table,
        )

    def status(self) -> ServiceStatus:
        self._expire()
        return ServiceStatus(
            len(self._replicas),
            tuple(progress for _, progress in self._starting.values()),
            tuple(report for _, report in self._ingresses.values()),
            tuple(self._failures),
        )

    def _expire(self) -> None:
        oldest_s = self._clock() - self._expire_after_s
        silent = [k for k, (heard_s, _) in self._replicas.items() if heard_s < oldest_s]
        for replica_id in silent:
            self.withdraw(replica_id)
        self._ingresses = {k: v for k, v in self._ingresses.items() if v[0] >= oldest_s}
        oldest_s = self._clock() - START_EXPIRES_AFTER_S
        self._starting = {k: v for k, v in self._starting.items() if v[0] >= oldest_s}
