"""Every metric of the service, defined once, with its unit in its name and fixed buckets.

Two owners: an ingress process and an engine process, each with a registry of its own. Nothing here
is global, and nothing here knows how metrics leave the process. Names end in their unit; counters
get `_total`. A counter that an alert watches exists from the start, at 0: a rate cannot see the
event that creates its series.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from service.errors import ERROR_TABLE
from service.observability.accepted_drafts import accepted_by_position
from service.observability.expert_metrics import ExpertMetrics
from service.observability.measured_attention import measured_attention
from service.routing.policy import RoutingReason
from workers.engine.observer import StepRecord
from workers.engine.protocol import EngineStats, FinishReason, ModelInfo

if TYPE_CHECKING:  # the ingress must not load torch
    from attention.roofline import HardwareLimits

# Four bounds or more a decade where latency matters: a quantile is as sharp as its bucket.
REQUEST_SECONDS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1,
                   1.5, 2, 3, 5, 7.5, 10, 15, 20, 30, 60, 120, 300)  # fmt: skip
TOKEN_SECONDS = (0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03,
                 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)  # fmt: skip
STEP_SECONDS = (0.0002, 0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02,
                0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 10)  # fmt: skip
SHORT_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01,
                 0.025, 0.05, 0.1, 0.25, 1)  # fmt: skip
ATTENTION_SECONDS = (0.00002, 0.00005, 0.0001, 0.00015, 0.0002, 0.0003, 0.0004, 0.0006, 0.0008,
                     0.001, 0.0015, 0.002, 0.003, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03,
                     0.05, 0.1, 0.25, 0.5, 1, 2.5)  # fmt: skip
TOKEN_COUNTS = tuple(float(1 << i) for i in range(0, 21, 2))
BATCH_SIZES = tuple(float(1 << i) for i in range(11))

# What operators are paged for: overload and whatever is the service's own fault.
_TOO_MANY_REQUESTS = 429
_ALARMING_CODES = tuple(
    code.value
    for code, row in ERROR_TABLE.items()
    if row.http_status == _TOO_MANY_REQUESTS or row.http_status >= 500
)
_USUAL_ENDS = (FinishReason.STOP.value, FinishReason.LENGTH.value, FinishReason.ABORT.value)


class RefusalMetrics:
    """Counts requests that generated nothing: those of a model, or those that named none."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._rejected = Counter(
            "tessera_requests_rejected",
            "Requests that generated nothing, by code.",
            ("code",),
            registry=registry,
        )
        for code in _ALARMING_CODES:
            self._rejected.labels(code)

    def on_rejected(self, code: str) -> None:
        self._rejected.labels(code).inc()


class IngressMetrics(RefusalMetrics):
    """Of one model. Implements the handler's RequestMetrics and the router's RouterMetrics."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self._count_requests(registry)
        self._time_requests(registry)
        self._prompt_tokens = Histogram(
            "tessera_request_prompt_tokens",
            "Prompt tokens of a sequence.",
            buckets=TOKEN_COUNTS,
            registry=registry,
        )
        self._output_tokens = Histogram(
            "tessera_request_output_tokens",
            "Output tokens of a sequence.",
            buckets=TOKEN_COUNTS,
            registry=registry,
        )

    def _count_requests(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, label: str = "", values: Iterable[str] = ()) -> Counter:
            family = Counter(name, text, [label] if label else [], registry=registry)
            for value in values:
                family.labels(value)
            return family

        self._accepted = counter("tessera_requests_accepted", "Requests sent to a replica.")
        self._finished = counter(
            "tessera_requests_finished",
            "Sequences that ended, by reason.",
            "reason",
            _USUAL_ENDS + _ALARMING_CODES,
        )
        self._routed = counter(
            "tessera_routing_decisions",
            "Sequences sent to a replica, by reason.",
            "reason",
            (reason.value for reason in RoutingReason),
        )
        self._tokens = counter("tessera_streamed_tokens", "Output tokens that reached the ingress.")

    def _time_requests(self, registry: CollectorRegistry) -> None:
        def histogram(
            name: str, text: str, buckets: tuple[float, ...] = REQUEST_SECONDS
        ) -> Histogram:
            return Histogram(name, text, buckets=buckets, registry=registry)

        self._ttft = histogram(
            "tessera_time_to_first_token_seconds",
            "From a request's arrival at the ingress to its first token.",
        )
        self._itl = histogram(
            "tessera_inter_token_latency_seconds",
            "Time between two tokens of a sequence at the ingress.",
            TOKEN_SECONDS,
        )
        self._queue = histogram(
            "tessera_queue_seconds",
            "From a sequence's arrival at the engine to its first step.",
        )
        self._prefill = histogram(
            "tessera_prefill_seconds",
            "From a sequence's first step to its first token, or to its embedding.",
        )
        self._e2e = histogram(
            "tessera_request_seconds",
            "From a request's arrival at the ingress to the end of a sequence.",
        )
        self._overhead = histogram(
            "tessera_serve_overhead_seconds",
            "Time of a sequence between router and engine, both ways, outside the engine.",
            SHORT_SECONDS,
        )
        self._pause = histogram(
            "tessera_stream_pause_seconds",
            "From the moment at which a sequence with output lost its replica to its next token.",
        )
        self._scale_up_wait = histogram(
            "tessera_scale_up_wait_seconds",
            "Time that a sequence waited for its model to be scaled up from zero.",
        )

    def on_accepted(self, num_prompt_tokens: int, num_choices: int) -> None:
        self._accepted.inc()

    def on_first_token(self, seconds: float, queue_s: float, prefill_s: float) -> None:
        self._tokens.inc()
        self._ttft.observe(seconds)
        self._queue.observe(queue_s)
        self._prefill.observe(prefill_s)

    def on_vector(self, queue_s: float, prefill_s: float) -> None:
        self._queue.observe(queue_s)
        self._prefill.observe(prefill_s)

    def on_tokens(self, count: int, inter_token_s: float) -> None:
        self._tokens.inc(count)
        self._itl.observe(inter_token_s)

    def on_finished(
        self,
        reason: str,
        *,
        num_prompt_tokens: int,
        num_cached_tokens: int,
        num_output_tokens: int,
        e2e_s: float,
    ) -> None:
        self._finished.labels(reason).inc()
        self._prompt_tokens.observe(num_prompt_tokens)
        self._output_tokens.observe(num_output_tokens)
        self._e2e.observe(e2e_s)

    def on_routed(self, reason: RoutingReason) -> None:
        self._routed.labels(reason.value).inc()

    def on_overhead(self, seconds: float) -> None:
        self._overhead.observe(seconds)

    def on_pause(self, seconds: float) -> None:
        self._pause.observe(seconds)

    def on_scale_up_wait(self, seconds: float) -> None:
        self._scale_up_wait.observe(seconds)


@dataclass(frozen=True, slots=True)
class IngressGauges:
    """What an ingress process holds for one model at this moment."""

    num_live_requests: int
    num_queued_tokens: int
    num_connected_replicas: int
    num_waiting_requests: int


class IngressStateCollector(Collector):
    """Reads an ingress's state of a model when metrics are collected, not when it changes."""

    def __init__(self, read: Callable[[], IngressGauges]) -> None:
        self._read = read

    def collect(self) -> Iterator[GaugeMetricFamily]:
        state = self._read()
        yield GaugeMetricFamily(
            "tessera_live_requests", "Sequences that have not ended.", state.num_live_requests
        )
        yield GaugeMetricFamily(
            "tessera_ingress_queued_tokens",
            "Prompt tokens of sequences without output yet.",
            state.num_queued_tokens,
        )
        yield GaugeMetricFamily(
            "tessera_connected_replicas",
            "Replicas that this ingress is connected to.",
            state.num_connected_replicas,
        )
        yield GaugeMetricFamily(
            "tessera_scale_up_waiting_requests",
            "Sequences that wait at the ingress because no replica can take them.",
            state.num_waiting_requests,
        )


class EngineMetrics:
    """An engine calls on_step. limits: of one rank's device; None leaves what is measured against
    them out."""

    def __init__(self, registry: CollectorRegistry, limits: "HardwareLimits | None") -> None:
        self._limits = limits
        self._step = Histogram(
            "tessera_step_seconds",
            "One step, first launch to token ids on the host.",
            ("phase",),
            buckets=STEP_SECONDS,
            registry=registry,
        )
        self._host = Histogram(
            "tessera_host_overhead_seconds",
            "Time the device waited for the host before a step although there was work.",
            buckets=SHORT_SECONDS,
            registry=registry,
        )
        self._draft = Histogram(
            "tessera_draft_seconds",
            "Time of a step with drafts in which these were looked for.",
            buckets=SHORT_SECONDS,
            registry=registry,
        )
        self._batch = Histogram(
            "tessera_step_sequences",
            "Sequences in a step.",
            ("phase",),
            buckets=BATCH_SIZES,
            registry=registry,
        )
        self._attention = Histogram(
            "tessera_attention_seconds",
            "Attention of one step, summed over layers.",
            ("phase", "backend"),
            buckets=ATTENTION_SECONDS,
            registry=registry,
        )
        self._experts = ExpertMetrics(registry)
        self._least = Counter(
            "tessera_attention_least_seconds",
            "What the measured attention would have taken at the hardware's limit.",
            ("phase",),
            registry=registry,
        )
        self._roofline = Gauge(
            "tessera_attention_roofline_ratio",
            "Share of the hardware's limit that the last measured attention reached.",
            ("phase",),
            registry=registry,
        )

    def on_step(self, record: StepRecord) -> None:
        self._step.labels(record.phase).observe(record.step_s)
        self._host.observe(record.host_gap_s)
        if record.draft_s:
            self._draft.observe(record.draft_s)
        if record.experts is not None:
            self._experts.on_record(record.experts)
        self._batch.labels(record.phase).observe(record.batch_size)
        for attention in record.attention:
            self._attention.labels(attention.phase, attention.backend).observe(attention.seconds)
            if self._limits is not None and attention.seconds > 0:
                least_s = self._limits.minimum_seconds(attention.num_bytes, attention.num_flops)
                self._least.labels(attention.phase).inc(least_s)
                self._roofline.labels(attention.phase).set(least_s / attention.seconds)


_STATS_GAUGES = (
    ("tessera_running_requests", "Sequences in the running batch.", "num_running"),
    ("tessera_waiting_requests", "Sequences waiting for their first step.", "num_waiting"),
    ("tessera_queued_tokens", "Prompt tokens not yet computed.", "queued_tokens"),
    ("tessera_running_tokens", "Tokens that running sequences keep in memory.", "running_tokens"),
    ("tessera_kv_pages", "Pages of KV memory.", "num_pages"),
    ("tessera_kv_pages_used", "Pages held by running sequences.", "num_used_pages"),
    ("tessera_kv_pages_evictable", "Pages of unused cached prefixes.", "num_evictable_pages"),
    (
        "tessera_step_prediction_error_seconds",
        "Seconds by which steps with prompt tokens miss their predicted durations, a recent mean.",
        "step_prediction_error_s",
    ),
    ("tessera_engine_sleep_level", "0: awake, 1: no KV memory, 2: no weights.", "sleep_level"),
)
_ACCOUNT_GAUGES = (
    ("tessera_kv_account_pages", "Pages of KV memory, by account.", "num_pages"),
    ("tessera_kv_account_pages_used", "Pages held by running sequences, by account.", "num_used"),
    (
        "tessera_kv_account_pages_evictable",
        "Pages of unused cached prefixes, by account.",
        "num_evictable",
    ),
)
_STATS_COUNTERS = (
    ("tessera_steps", "Steps run.", "num_steps"),
    ("tessera_preemptions", "Sequences sent back to wait for lack of pages.", "num_preemptions"),
    ("tessera_prompt_tokens", "Prompt tokens taken in.", "num_prompt_tokens"),
    (
        "tessera_prefix_cache_hit_tokens",
        "Prompt tokens found in the prefix cache.",
        "num_cached_prompt_tokens",
    ),
    ("tessera_output_tokens", "Tokens generated.", "num_output_tokens"),
    ("tessera_engine_finished_requests", "Sequences that left the engine.", "num_finished"),
    ("tessera_draft_tokens", "Drafts of speculation that steps verified.", "num_draft_tokens"),
    (
        "tessera_accepted_draft_tokens",
        "Drafts that were right.",
        "num_accepted_draft_tokens",
    ),
    ("tessera_drafted_runs", "Rows of steps that had drafts to verify.", "num_drafted_runs"),
)


class EngineStatsCollector(Collector):
    """Turns the engine's own counters into metrics when they are collected.

    clock: Unix time; the engine counts as started when this is made.
    """

    def __init__(
        self,
        info: ModelInfo,
        stats: Callable[[], EngineStats],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._info = info
        self._stats = stats
        self._started_s = clock()

    def collect(self) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        stats = self._stats()
        for name, text, attribute in _STATS_GAUGES:
            yield GaugeMetricFamily(name, text, getattr(stats, attribute))
        for name, text, attribute in _STATS_COUNTERS:
            yield CounterMetricFamily(name, text, getattr(stats, attribute))
        for name, text, attribute in _ACCOUNT_GAUGES:
            gauge = GaugeMetricFamily(name, text, None, ("account",))
            for account in stats.accounts:
                gauge.add_metric([account.name], getattr(account, attribute))
            yield gauge
        yield accepted_by_position(stats.accepted_by_position)
        yield from measured_attention(self._info.attention_times)
        labels = ("model", "attention_backend", "dtype", "tp_size", "page_size")
        info = GaugeMetricFamily(
            "tessera_engine_info", "Facts of the engine; always 1.", None, labels
        )
        info.add_metric([str(v) for v in self._info_values()], 1.0)
        yield info
        yield GaugeMetricFamily(
            "tessera_engine_start_time_seconds", "Unix time of the engine's start.", self._started_s
        )

    def _info_values(self) -> tuple[str | int, ...]:
        info = self._info
        return info.name, info.attention_backend, info.dtype, info.tp_size, info.page_size
