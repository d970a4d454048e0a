"""Every metric that the service exports, with its kind and labels, learnt from the service itself.

Registries are fed one event of each sort, so that a renamed or dropped metric changes the catalogue
without anyone listing it here.
"""

from dataclasses import dataclass
from functools import cache

from prometheus_client import CollectorRegistry

from attention.roofline import HardwareLimits
from service.autoscaling.metrics import ScalingMetrics
from service.observability.metrics import (
    EngineMetrics,
    EngineStatsCollector,
    IngressGauges,
    IngressMetrics,
    IngressStateCollector,
)
from service.routing.policy import RoutingReason
from workers.engine.observer import AttentionRecord, ExpertRecord, StepRecord
from workers.engine.protocol import AccountPages, AttentionMeasurementRecord, EngineStats, ModelInfo

# What the exporter adds to every series, and Prometheus when it scrapes.
EXPORTER_LABELS = frozenset({"process", "replica", "model"})
TARGET_LABELS = frozenset({"job", "instance"})
PROMETHEUS_METRICS = frozenset({"up", "scrape_duration_seconds", "scrape_samples_scraped"})


@dataclass(frozen=True, slots=True)
class ExportedMetric:
    """process: "engine", "ingress" or "autoscaler".

    kind: counter, gauge, or bucket, sum, count of a histogram.
    """

    process: str
    kind: str
    labels: frozenset[str]


@cache
def exported_metrics() -> dict[str, ExportedMetric]:
    """By the name that PromQL uses."""
    registries = {
        "ingress": _ingress_registry(),
        "engine": _engine_registry(),
        "autoscaler": ScalingMetrics().registry,
    }
    found: dict[str, ExportedMetric] = {}
    for process, registry in registries.items():
        for family in registry.collect():
            for sample in family.samples:
                if sample.name.endswith("_created"):
                    continue
                kind = sample.name[len(family.name) + 1 :]
                if family.type != "histogram":
                    kind = family.type
                labels = frozenset(sample.labels) | EXPORTER_LABELS | TARGET_LABELS
                found[sample.name] = ExportedMetric(process, kind, labels)
    return found


def _ingress_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = IngressMetrics(registry)
    registry.register(IngressStateCollector(lambda: IngressGauges(0, 0, 0, 0)))
    metrics.on_routed(RoutingReason.LOAD)
    return registry


def _engine_registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, HardwareLimits(bytes_per_s=1.0, flops_per_s=1.0))
    measured = AttentionMeasurementRecord("decode", 1, 1, 256, False, "torch_native", 0.1, True)
    info = ModelInfo(
        "m", 10, 100, (0,), "torch_native", 16, 8, 1, "float32", 100, attention_times=(measured,)
    )
    accounts = (AccountPages("every_token", 10, 2, 1),)
    stats = EngineStats(accounts=accounts, accepted_by_position=(1,))
    registry.register(EngineStatsCollector(info, lambda: stats))
    attention = AttentionRecord("decode", "torch_native", 0.1, num_bytes=1, num_flops=1)
    experts = ExpertRecord((1,), 1.0, 1.0)
    metrics.on_step(StepRecord("decode", 0.1, 0.0, 1, 0, (attention,), experts=experts))
    return registry
