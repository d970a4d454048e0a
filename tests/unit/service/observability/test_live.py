"""What a service does now, read back from what its processes pushed."""

import pytest
from prometheus_client import CollectorRegistry

from attention.roofline import HardwareLimits
from service.observability.exporter import MetricsAggregator, take_snapshot
from service.observability.live import live_state
from service.observability.metrics import (
    EngineMetrics,
    EngineStatsCollector,
    IngressGauges,
    IngressStateCollector,
)
from workers.engine.observer import AttentionRecord, StepRecord
from workers.engine.protocol import EngineStats, ModelInfo

INFO = ModelInfo("m", 10, 100, (0,), "fa3", 16, 8, 2, "float32", 100)
STATS = EngineStats(
    num_running=1,
    num_waiting=2,
    queued_tokens=3,
    running_tokens=4,
    num_pages=50,
    num_used_pages=6,
    num_evictable_pages=7,
    num_steps=8,
    num_prompt_tokens=90,
    num_cached_prompt_tokens=10,
    num_output_tokens=11,
    num_draft_tokens=12,
    num_accepted_draft_tokens=5,
)


def engine(limits, records=()):
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, limits)
    registry.register(EngineStatsCollector(INFO, lambda: STATS))
    for phase, seconds in records:
        attention = AttentionRecord(phase, "fa3", seconds, num_bytes=10**9, num_flops=1)
        metrics.on_step(StepRecord(phase, 0.01, 0.0, 1, 0, (attention,)))
    return registry


def ingress(num_live):
    registry = CollectorRegistry()
    registry.register(IngressStateCollector(lambda: IngressGauges(num_live, 0, 1, 0)))
    return registry


def state_of(*pushes):
    now = iter(range(1, 100))
    aggregator = MetricsAggregator(expire_after_s=1000, clock=lambda: float(next(now)))
    for registry, process, replica in pushes:
        aggregator.push(take_snapshot(registry, process, replica, model="m"))
    return live_state(aggregator.alive())


def test_every_number_of_an_engine_is_told() -> None:
    (replica,) = state_of((engine(None), "engine", "e1")).replicas
    assert (replica.replica, replica.model, replica.pushed_s) == ("e1", "m", 1.0)
    assert (replica.attention_backend, replica.page_size) == ("fa3", 16)
    told = (
        replica.num_running,
        replica.num_waiting,
        replica.num_queued_tokens,
        replica.num_running_tokens,
        replica.num_pages,
        replica.num_used_pages,
        replica.num_evictable_pages,
        replica.num_steps,
        replica.num_prompt_tokens,
        replica.num_cached_prompt_tokens,
        replica.num_output_tokens,
        replica.num_draft_tokens,
        replica.num_accepted_draft_tokens,
    )
    assert told == (1, 2, 3, 4, 50, 6, 7, 8, 90, 10, 11, 12, 5)
    assert replica.phases == []


def test_attention_is_told_by_phase_with_its_limit_where_that_is_known() -> None:
    records = (("extend", 0.004), ("decode", 0.002), ("decode", 0.006))
    limits = HardwareLimits(bytes_per_s=1e12, flops_per_s=1e14)
    (known,) = state_of((engine(limits, records), "engine", "e1")).replicas
    decode, extend = known.phases
    assert (decode.phase, decode.num_measured_steps) == ("decode", 2)
    assert decode.seconds == pytest.approx(0.008)
    assert decode.least_seconds == pytest.approx(0.002)
    assert (extend.phase, extend.num_measured_steps) == ("extend", 1)
    (unknown,) = state_of((engine(None, records), "engine", "e1")).replicas
    assert [phase.least_seconds for phase in unknown.phases] == [None, None]


def test_requests_of_all_ingresses_count_and_replicas_are_sorted() -> None:
    state = state_of(
        (ingress(3), "ingress", "i1"),
        (engine(None), "engine", "e2"),
        (engine(None), "engine", "e1"),
        (ingress(4), "ingress", "i2"),
    )
    assert state.num_live_requests == 7
    assert [replica.replica for replica in state.replicas] == ["e1", "e2"]


def test_a_service_without_engines_has_none() -> None:
    state = state_of((ingress(0), "ingress", "i1"))
    assert (state.num_live_requests, state.replicas) == (0, [])
