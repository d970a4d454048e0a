"""Every sample of every metric has the value that was reported, and no metric goes untested."""

import pytest
from prometheus_client import CollectorRegistry

from attention.roofline import HardwareLimits
from service.observability.metrics import (
    EngineMetrics,
    EngineStatsCollector,
    IngressGauges,
    IngressMetrics,
    IngressStateCollector,
    RefusalMetrics,
)
from service.routing.policy import RoutingReason
from workers.engine.observer import AttentionRecord, ExpertRecord, StepRecord
from workers.engine.protocol import AccountPages, AttentionMeasurementRecord, EngineStats, ModelInfo

MEASURED = (
    AttentionMeasurementRecord("decode", 64, 1, 4095, True, "fa3", 0.25, True),
    AttentionMeasurementRecord("extend", 1, 512, 0, False, "triton", 0.5, False),
)
INFO = ModelInfo("m", 10, 100, (0,), "fa3", 16, 8, 2, "float32", 100, attention_times=MEASURED)

INGRESS = {
    "tessera_requests_rejected_total{code=overloaded}": 2,
    "tessera_requests_rejected_total{code=timeout}": 0,
    "tessera_requests_accepted_total": 3,
    "tessera_requests_finished_total{reason=stop}": 1,
    "tessera_requests_finished_total{reason=replica_lost}": 2,
    "tessera_requests_finished_total{reason=length}": 0,
    "tessera_routing_decisions_total{reason=prefix}": 2,
    "tessera_routing_decisions_total{reason=load}": 1,
    "tessera_streamed_tokens_total": 2 + 4 + 7,
    "tessera_request_prompt_tokens_count": 3,
    "tessera_request_prompt_tokens_sum": 10 + 20 + 40,
    "tessera_request_output_tokens_count": 3,
    "tessera_request_output_tokens_sum": 5 + 6 + 7,
    "tessera_time_to_first_token_seconds_count": 2,
    "tessera_time_to_first_token_seconds_sum": 0.1 + 0.2,
    "tessera_queue_seconds_count": 2,
    "tessera_queue_seconds_sum": 0.01 + 0.02,
    "tessera_prefill_seconds_count": 2,
    "tessera_prefill_seconds_sum": 0.03 + 0.04,
    "tessera_inter_token_latency_seconds_count": 2,
    "tessera_inter_token_latency_seconds_sum": 0.5 + 0.6,
    "tessera_request_seconds_count": 3,
    "tessera_request_seconds_sum": 1.5 + 2.5 + 3.5,
    "tessera_serve_overhead_seconds_count": 2,
    "tessera_serve_overhead_seconds_sum": 0.004 + 0.005,
    "tessera_stream_pause_seconds_count": 2,
    "tessera_stream_pause_seconds_sum": 0.25 + 0.5,
    "tessera_scale_up_wait_seconds_count": 1,
    "tessera_scale_up_wait_seconds_sum": 70,
    "tessera_live_requests": 31,
    "tessera_ingress_queued_tokens": 32,
    "tessera_connected_replicas": 33,
    "tessera_scale_up_waiting_requests": 34,
}
ENGINE = {
    "tessera_step_seconds_count{phase=decode}": 2,
    "tessera_step_seconds_sum{phase=decode}": 0.004 + 0.006,
    "tessera_step_seconds_sum{phase=extend}": 0.1,
    "tessera_draft_seconds_count": 1,
    "tessera_draft_seconds_sum": 0.003,
    "tessera_host_overhead_seconds_count": 3,
    "tessera_host_overhead_seconds_sum": 0.0001 + 0.0002 + 0.0004,
    "tessera_step_sequences_count{phase=decode}": 2,
    "tessera_step_sequences_sum{phase=decode}": 2 + 3,
    "tessera_step_sequences_sum{phase=extend}": 1,
    "tessera_attention_seconds_count{phase=decode,backend=fa3}": 2,
    "tessera_attention_seconds_sum{phase=decode,backend=fa3}": 0.002 + 0.004,
    "tessera_attention_least_seconds_total{phase=decode}": 0.001 + 0.003,
    "tessera_attention_roofline_ratio{phase=decode}": 0.75,
    "tessera_expert_tokens_total{part=0}": 5 + 1,
    "tessera_expert_tokens_total{part=1}": 7 + 2,
    "tessera_expert_busiest_ratio{of=experts}": 3.0,
    "tessera_expert_busiest_ratio{of=parts}": 1.25,
    "tessera_running_requests": 1,
    "tessera_waiting_requests": 2,
    "tessera_queued_tokens": 3,
    "tessera_running_tokens": 4,
    "tessera_kv_pages": 5,
    "tessera_kv_pages_used": 6,
    "tessera_kv_pages_evictable": 7,
    "tessera_kv_account_pages{account=every_token}": 21,
    "tessera_kv_account_pages_used{account=every_token}": 22,
    "tessera_kv_account_pages_evictable{account=every_token}": 23,
    "tessera_kv_account_pages{account=window_1024}": 31,
    "tessera_kv_account_pages_used{account=window_1024}": 32,
    "tessera_kv_account_pages_evictable{account=window_1024}": 33,
    "tessera_steps_total": 8,
    "tessera_preemptions_total": 9,
    "tessera_draft_tokens_total": 14,
    "tessera_accepted_draft_tokens_total": 15,
    "tessera_drafted_runs_total": 16,
    "tessera_accepted_draft_tokens_by_position_total{position=1}": 9,
    "tessera_accepted_draft_tokens_by_position_total{position=2}": 6,
    "tessera_prompt_tokens_total": 10,
    "tessera_prefix_cache_hit_tokens_total": 11,
    "tessera_output_tokens_total": 12,
    "tessera_engine_finished_requests_total": 13,
    "tessera_step_prediction_error_seconds": 0.25,
    "tessera_engine_sleep_level": 2,
    "tessera_attention_measured_seconds{phase=decode,backend=fa3,rows=64,new_tokens=1,"
    "prefix_tokens=4095,lengths=unlike,is_taken=yes}": 0.25,
    "tessera_attention_measured_seconds{phase=extend,backend=triton,rows=1,new_tokens=512,"
    "prefix_tokens=0,lengths=like,is_taken=no}": 0.5,
    "tessera_engine_info{model=m,attention_backend=fa3,dtype=float32,tp_size=2,page_size=16}": 1,
    "tessera_engine_start_time_seconds": 1234.5,
}


@pytest.fixture
def ingress():
    registry = CollectorRegistry()
    metrics = IngressMetrics(registry)
    registry.register(IngressStateCollector(lambda: IngressGauges(31, 32, 33, 34)))
    for _ in range(3):
        metrics.on_accepted(10, 2)
    for _ in range(2):
        metrics.on_rejected("overloaded")
        metrics.on_routed(RoutingReason.PREFIX)
    metrics.on_routed(RoutingReason.LOAD)
    metrics.on_first_token(0.1, 0.01, 0.03)
    metrics.on_first_token(0.2, 0.02, 0.04)
    metrics.on_tokens(4, 0.5)
    metrics.on_tokens(7, 0.6)
    for reason, prompt, output, e2e_s in (
        ("stop", 10, 5, 1.5), ("replica_lost", 20, 6, 2.5), ("replica_lost", 40, 7, 3.5)
    ):  # fmt: skip
        metrics.on_finished(
            reason,
            num_prompt_tokens=prompt,
            num_cached_tokens=1,
            num_output_tokens=output,
            e2e_s=e2e_s,
        )
    metrics.on_overhead(0.004)
    metrics.on_overhead(0.005)
    metrics.on_pause(0.25)
    metrics.on_pause(0.5)
    metrics.on_scale_up_wait(70)
    return registry


@pytest.fixture
def engine():
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, HardwareLimits(bytes_per_s=1e12, flops_per_s=1e14))
    numbers = {name: i for i, name in enumerate(COUNTED_STATS, 1)}
    accounts = (AccountPages("every_token", 21, 22, 23), AccountPages("window_1024", 31, 32, 33))
    stats = EngineStats(
        **numbers,
        step_prediction_error_s=0.25,
        accounts=accounts,
        accepted_by_position=(9, 6),
        sleep_level=2,
    )
    registry.register(EngineStatsCollector(INFO, lambda: stats, clock=lambda: 1234.5))
    first = AttentionRecord("decode", "fa3", 0.002, num_bytes=10**9, num_flops=1)
    second = AttentionRecord("decode", "fa3", 0.004, num_bytes=1, num_flops=3 * 10**11)
    loads = ExpertRecord((5, 7), 2.0, 1.5), ExpertRecord((1, 2), 3.0, 1.25)
    metrics.on_step(StepRecord("decode", 0.004, 0.0001, 2, 0, (first,), experts=loads[0]))
    metrics.on_step(StepRecord("decode", 0.006, 0.0002, 3, 0, (second,), experts=loads[1]))
    metrics.on_step(StepRecord("extend", 0.1, 0.0004, 1, 100, (), draft_s=0.003))
    return registry


COUNTED_STATS = (
    "num_running", "num_waiting", "queued_tokens", "running_tokens", "num_pages", "num_used_pages",
    "num_evictable_pages", "num_steps", "num_preemptions", "num_prompt_tokens",
    "num_cached_prompt_tokens", "num_output_tokens", "num_finished", "num_draft_tokens",
    "num_accepted_draft_tokens", "num_drafted_runs",
)  # fmt: skip


def value_of(registry, sample):
    name, _, rest = sample.partition("{")
    labels = dict(pair.split("=") for pair in rest.rstrip("}").split(",") if pair)
    return registry.get_sample_value(name, labels)


@pytest.mark.parametrize("sample", INGRESS)
def test_a_sample_of_an_ingress_has_the_value_that_was_reported(ingress, sample):
    assert value_of(ingress, sample) == pytest.approx(INGRESS[sample])


@pytest.mark.parametrize("sample", ENGINE)
def test_a_sample_of_an_engine_has_the_value_that_was_reported(engine, sample):
    assert value_of(engine, sample) == pytest.approx(ENGINE[sample])


def families(registry):
    return {family.name for family in registry.collect()}


def families_of(samples):
    suffixes = ("_total", "_count", "_sum")
    names = (sample.partition("{")[0] for sample in samples)
    return {
        next((name.removesuffix(s) for s in suffixes if name.endswith(s)), name) for name in names
    }


def test_every_metric_there_is_has_its_value_tested(ingress, engine):
    """Who adds a metric adds its value above; one that is gone is missed here."""
    assert families(ingress) == families_of(INGRESS)
    assert families(engine) == families_of(ENGINE)
    refusals = CollectorRegistry()
    RefusalMetrics(refusals)
    assert families(refusals) <= families(ingress)


# Least and greatest finite bound. A quantile is as sharp as the buckets around it, so what takes
# milliseconds must not be counted in buckets for minutes.
BOUNDS = {
    "tessera_request_prompt_tokens": (1, 1 << 20),
    "tessera_request_output_tokens": (1, 1 << 20),
    "tessera_time_to_first_token_seconds": (0.005, 300),
    "tessera_inter_token_latency_seconds": (0.0005, 2.5),
    "tessera_queue_seconds": (0.005, 300),
    "tessera_prefill_seconds": (0.005, 300),
    "tessera_request_seconds": (0.005, 300),
    "tessera_serve_overhead_seconds": (0.00001, 1),
    "tessera_stream_pause_seconds": (0.005, 300),
    "tessera_scale_up_wait_seconds": (0.005, 300),
    "tessera_step_seconds": (0.0002, 10),
    "tessera_draft_seconds": (0.00001, 1),
    "tessera_host_overhead_seconds": (0.00001, 1),
    "tessera_step_sequences": (1, 1024),
    "tessera_attention_seconds": (0.00002, 2.5),
}


def bounds(registry):
    """Of every histogram, rising."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name.endswith("_bucket") and sample.labels["le"] != "+Inf":
                found.setdefault(family.name, set()).add(float(sample.labels["le"]))
    return {name: sorted(edges) for name, edges in found.items()}


def test_the_buckets_of_a_histogram_span_what_it_counts_without_gaps(ingress, engine):
    every = {**bounds(ingress), **bounds(engine)}
    assert {name: (edges[0], edges[-1]) for name, edges in every.items()} == BOUNDS
    for name, edges in every.items():
        steps = [later / earlier for earlier, later in zip(edges, edges[1:], strict=False)]
        assert 1 < min(steps) <= max(steps) <= 5, name


def test_attention_that_took_no_time_that_a_clock_can_show_has_no_share_of_the_limit():
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, HardwareLimits(bytes_per_s=1e12, flops_per_s=1e14))
    attention = AttentionRecord("decode", "fa3", 0.0, num_bytes=10**9, num_flops=1)
    metrics.on_step(StepRecord("decode", 0.004, 0.0001, 2, 0, (attention,)))
    labels = {"phase": "decode"}
    assert registry.get_sample_value("tessera_attention_roofline_ratio", labels) is None
    assert registry.get_sample_value("tessera_attention_least_seconds_total", labels) is None
