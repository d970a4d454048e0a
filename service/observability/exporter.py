"""One scrape target for all processes of a service: they push snapshots, it serves the union.

Snapshots are msgspec structs in bytes. A process that has not pushed for expire_after_s is gone,
and its series with it. Knows neither Ray nor what a metric means.
"""

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector


class SampleSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """One sample of a family."""

    name: str
    labels: dict[str, str]
    value: float


class FamilySnapshot(msgspec.Struct, frozen=True, array_like=True):
    """One metric family of one process."""

    name: str
    text: str
    kind: str
    samples: list[SampleSnapshot]


class ProcessSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """All metrics of one process, or those of one part of it.

    process: its role; replica: which one of that role. labels: what sets the part apart.
    """

    process: str
    replica: str
    families: list[FamilySnapshot]
    labels: dict[str, str] = {}

    @property
    def own_labels(self) -> dict[str, str]:
        """Of every series."""
        return {"process": self.process, "replica": self.replica, **self.labels}


def take_snapshot(registry: CollectorRegistry, process: str, replica: str, **labels: str) -> bytes:
    """The registry's present values, encoded for MetricsAggregator.push."""
    families = [
        FamilySnapshot(
            family.name,
            family.documentation,
            family.type,
            [
                SampleSnapshot(sample.name, dict(sample.labels), sample.value)
                for sample in family.samples
                if not sample.name.endswith("_created")
            ],
        )
        for family in registry.collect()
    ]
    return msgspec.msgpack.encode(ProcessSnapshot(process, replica, families, labels))


class MetricsAggregator(Collector):
    """Thread-safe: pushes and scrapes come from different threads."""

    def __init__(self, expire_after_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._expire_after_s = expire_after_s
        self._clock = clock
        self._lock = threading.Lock()
        self._decoder = msgspec.msgpack.Decoder(ProcessSnapshot)
        self._latest: dict[tuple[str, ...], tuple[float, ProcessSnapshot]] = {}

    def push(self, snapshot: bytes) -> None:
        """Replace the series of the same labels. Raises msgspec.MsgspecError on anything else."""
        decoded = self._decoder.decode(snapshot)
        with self._lock:
            self._latest[tuple(decoded.own_labels.values())] = (self._clock(), decoded)

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        for _, snapshot in self.alive():
            own = snapshot.own_labels
            for family in snapshot.families:
                metric = families.get(family.name)
                if metric is None:
                    metric = Metric(family.name, family.text, family.kind)
                    families[family.name] = metric
                for sample in family.samples:
                    metric.add_sample(sample.name, {**sample.labels, **own}, sample.value)
        yield from (families[name] for name in sorted(families))

    def alive(self) -> list[tuple[float, ProcessSnapshot]]:
        """The latest snapshots, each with the second of its push on the clock."""
        with self._lock:
            oldest_s = self._clock() - self._expire_after_s
            self._latest = {k: v for k, v in self._latest.items() if v[0] >= oldest_s}
            return list(self._latest.values())


class MetricsExporter:
    """Serves an aggregator's metrics over HTTP on a thread of its own."""

    def __init__(self, host: str, port: int, expire_after_s: float) -> None:
        """port 0 takes a free one. Raises OSError if the address cannot be bound."""
        self._aggregator = MetricsAggregator(expire_after_s)
        self._registry = CollectorRegistry()
        self._registry.register(self._aggregator)
        self._server, self._thread = start_http_server(port, host, self._registry)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def push(self, snapshot: bytes) -> None:
        self._aggregator.push(snapshot)

    def alive(self) -> list[tuple[float, ProcessSnapshot]]:
        """See MetricsAggregator.alive()."""
        return self._aggregator.alive()

    def text(self) -> bytes:
        """What a scrape gets, in Prometheus' text format 0.0.4."""
        return generate_latest(self._registry)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
