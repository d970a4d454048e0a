"""Metrics and their way to one scrape target."""

import subprocess
import urllib.error
import urllib.request

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from attention.roofline import HardwareLimits
from service.observability.exporter import MetricsAggregator, MetricsExporter, take_snapshot
from service.observability.metrics import (
    EngineMetrics,
    EngineStatsCollector,
    IngressGauges,
    IngressMetrics,
    IngressStateCollector,
)
from service.routing.policy import RoutingReason
from tests.programs import needed
from workers.engine.observer import AttentionRecord, StepRecord
from workers.engine.protocol import EngineStats, ModelInfo

INFO = ModelInfo("m", 10, 100, (0,), "torch_native", 16, 8, 1, "float32", 100)


def ingress_registry():
    registry = CollectorRegistry()
    metrics = IngressMetrics(registry)
    registry.register(IngressStateCollector(lambda: IngressGauges(3, 40, 2, 1)))
    metrics.on_accepted(10, 1)
    metrics.on_first_token(0.1, 0.02, 0.03)
    metrics.on_tokens(4, 0.01)
    metrics.on_finished(
        "stop", num_prompt_tokens=10, num_cached_tokens=4, num_output_tokens=5, e2e_s=0.5
    )
    metrics.on_rejected("overloaded")
    metrics.on_routed(RoutingReason.PREFIX)
    metrics.on_overhead(0.0004)
    metrics.on_pause(0.25)
    metrics.on_scale_up_wait(7.0)
    return registry


def engine_registry(stats=None, seconds=0.002):
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, HardwareLimits(bytes_per_s=1e12, flops_per_s=1e14))
    registry.register(EngineStatsCollector(INFO, lambda: stats or EngineStats(num_running=2)))
    attention = AttentionRecord("decode", "fa3", seconds, num_bytes=10**9, num_flops=10**9)
    metrics.on_step(StepRecord("decode", 0.004, 0.0001, 2, 0, (attention,)))
    return registry


def scrape(collector):
    registry = CollectorRegistry()
    registry.register(collector)
    text = generate_latest(registry).decode()
    return text, {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def whole_service():
    aggregator = MetricsAggregator(expire_after_s=10)
    aggregator.push(take_snapshot(ingress_registry(), "ingress", "i1"))
    aggregator.push(take_snapshot(engine_registry(), "engine", "e1"))
    aggregator.push(take_snapshot(engine_registry(), "engine", "e2"))
    return aggregator


def test_every_process_has_its_own_series_of_one_family():
    text, samples = scrape(whole_service())
    for replica in ("e1", "e2"):
        key = ("tessera_running_requests", (("process", "engine"), ("replica", replica)))
        assert samples[key] == 2
    assert text.count("# TYPE tessera_running_requests gauge") == 1


def test_parts_of_a_process_keep_their_series_apart_by_their_labels():
    aggregator = MetricsAggregator(expire_after_s=10)
    for model in ("a", "b", "b"):
        aggregator.push(take_snapshot(ingress_registry(), "ingress", "i1", model=model))
    _, samples = scrape(aggregator)
    of_requests = [
        dict(labels) for name, labels in samples if name == "tessera_requests_accepted_total"
    ]
    assert of_requests == [{"process": "ingress", "replica": "i1", "model": m} for m in "ab"]


def test_promtool_finds_nothing_to_complain_about():
    promtool = needed("promtool")
    text, _ = scrape(whole_service())
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=text, text=True, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


def test_pauses_and_waits_are_two_things():
    registry = ingress_registry()
    assert registry.get_sample_value("tessera_stream_pause_seconds_sum") == 0.25
    assert registry.get_sample_value("tessera_scale_up_wait_seconds_sum") == 7.0


def test_the_roofline_ratio_is_the_least_time_over_the_measured_time():
    _, samples = scrape(whole_service())
    key = (
        "tessera_attention_roofline_ratio",
        (("phase", "decode"), ("process", "engine"), ("replica", "e1")),
    )
    assert samples[key] == pytest.approx(0.5)


def test_least_and_measured_seconds_add_up_so_that_their_rates_give_the_share_over_any_window():
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, HardwareLimits(bytes_per_s=1e9, flops_per_s=1e12))
    for seconds, num_bytes, num_flops in ((0.004, 10**6, 10), (0.008, 10, 2 * 10**9)):
        attention = AttentionRecord("extend", "fa3", seconds, num_bytes, num_flops)
        metrics.on_step(StepRecord("extend", 0.01, 0.0, 1, 5, (attention,)))
    labels = {"phase": "extend"}
    least_s = registry.get_sample_value("tessera_attention_least_seconds_total", labels)
    labels["backend"] = "fa3"
    seconds = registry.get_sample_value("tessera_attention_seconds_sum", labels)
    assert (least_s, seconds) == pytest.approx((0.003, 0.012))


def test_an_engine_tells_when_it_started():
    registry = CollectorRegistry()
    registry.register(EngineStatsCollector(INFO, EngineStats, clock=lambda: 1234.5))
    assert registry.get_sample_value("tessera_engine_start_time_seconds") == 1234.5


def test_what_alerts_watch_is_zero_before_it_first_happens():
    registry = CollectorRegistry()
    IngressMetrics(registry)
    for reason in ("stop", "length", "abort", "replica_lost", "internal", "timeout", "unavailable"):
        labels = {"reason": reason}
        assert registry.get_sample_value("tessera_requests_finished_total", labels) == 0
    for code in ("overloaded", "unavailable", "tokenizer_failed", "internal", "draining"):
        assert registry.get_sample_value("tessera_requests_rejected_total", {"code": code}) == 0
    for reason in RoutingReason:
        labels = {"reason": reason.value}
        assert registry.get_sample_value("tessera_routing_decisions_total", labels) == 0


def test_a_refusal_that_is_the_clients_own_has_no_series_until_it_happens():
    registry = CollectorRegistry()
    metrics = IngressMetrics(registry)
    labels = {"code": "context_length_exceeded"}
    assert registry.get_sample_value("tessera_requests_rejected_total", labels) is None
    metrics.on_rejected("context_length_exceeded")
    assert registry.get_sample_value("tessera_requests_rejected_total", labels) == 1


def test_without_hardware_limits_there_is_no_roofline_sample():
    registry = CollectorRegistry()
    metrics = EngineMetrics(registry, None)
    attention = AttentionRecord("extend", "torch_native", 0.1, 10, 10)
    metrics.on_step(StepRecord("extend", 0.2, 0.0, 1, 5, (attention,)))
    assert registry.get_sample_value(
        "tessera_attention_seconds_count", {"phase": "extend", "backend": "torch_native"}
    )
    assert (
        registry.get_sample_value("tessera_attention_roofline_ratio", {"phase": "extend"}) is None
    )


def test_series_of_a_silent_process_expire_and_return_with_it():
    now = [0.0]
    aggregator = MetricsAggregator(expire_after_s=5, clock=lambda: now[0])
    snapshot = take_snapshot(engine_registry(), "engine", "e1")
    aggregator.push(snapshot)
    now[0] = 5.0
    assert "e1" in scrape(aggregator)[0]
    now[0] = 5.1
    assert "e1" not in scrape(aggregator)[0]
    aggregator.push(snapshot)
    assert "e1" in scrape(aggregator)[0]


def test_a_later_push_replaces_the_series_of_its_process():
    aggregator = MetricsAggregator(expire_after_s=5)
    for count in (5, 9):
        stats = EngineStats(num_output_tokens=count)
        aggregator.push(take_snapshot(engine_registry(stats), "engine", "e1"))
    _, samples = scrape(aggregator)
    key = ("tessera_output_tokens_total", (("process", "engine"), ("replica", "e1")))
    assert samples[key] == 9


@pytest.mark.parametrize("garbage", [b"", b"\xc1", b"\x93\x01\x02\x03", b"garbage"])
def test_garbage_is_refused_and_changes_nothing(garbage):
    aggregator = whole_service()
    before = scrape(aggregator)
    with pytest.raises(msgspec.MsgspecError):
        aggregator.push(garbage)
    assert scrape(aggregator) == before


def test_the_exporter_serves_what_was_pushed():
    exporter = MetricsExporter("127.0.0.1", 0, expire_after_s=10)
    assert exporter._server.server_address[0] == "127.0.0.1", "nowhere else than it was told"
    exporter.push(take_snapshot(ingress_registry(), "ingress", "i1"))
    url = f"http://127.0.0.1:{exporter.port}/metrics"
    with urllib.request.urlopen(url, timeout=5) as answer:
        body = answer.read().decode()
    exporter.close()
    assert not exporter._thread.is_alive()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)
    assert (
        'tessera_routing_decisions_total{process="ingress",reason="prefix",replica="i1"} 1.0'
        in body
    )


def test_a_snapshot_leaves_out_when_counters_were_made():
    """Each series would have a second one, of a time that no dashboard asks for."""
    snapshot = msgspec.msgpack.decode(take_snapshot(ingress_registry(), "ingress", "i1"))
    names = {sample[0] for family in snapshot[2] for sample in family[3]}
    assert "tessera_requests_accepted_total" in names
    assert "tessera_request_seconds_sum" in names
    assert not [name for name in names if name.endswith("_created")]


def test_families_come_sorted_and_with_what_they_are_and_say():
    registry = CollectorRegistry()
    registry.register(whole_service())
    families = list(registry.collect())
    assert [family.name for family in families] == sorted({family.name for family in families})
    steps = next(family for family in families if family.name == "tessera_steps")
    assert (steps.type, steps.documentation) == ("counter", "Steps run.")
