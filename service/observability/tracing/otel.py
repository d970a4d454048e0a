"""Spans of requests with OpenTelemetry. Imported only where tracing is enabled.

The server span begins with the request, so that its id can be returned; every other span is made
at the request's end, from times that its record holds. The engine takes no part: it reports how
long a request queued and prefilled, and the ingress places these before the first output.
"""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from service.errors import ERROR_TABLE
from service.observability.request_log.record import (
    ChoiceTimes,
    RequestRecord,
    RequestSpan,
    RouteTimes,
)
from service.observability.tracing.settings import TracingSettings

_PROPAGATOR = TraceContextTextMapPropagator()
_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
}
# What a client did wrong, leaving included, is no error of a server's span.
_SERVER_ERRORS = frozenset(
    code.value for code, row in ERROR_TABLE.items() if row.http_status >= 500
)
Attributes = Mapping[str, str | int | float | tuple[str, ...]]


def make_provider(settings: TracingSettings, instance_id: str) -> TracerProvider:
    """A provider that samples as the settings say and exports nothing yet."""
    resource = Resource.create(
        {"service.name": settings.service_name, "service.instance.id": instance_id}
    )
    sampler = ParentBased(TraceIdRatioBased(settings.sample_ratio))
    return TracerProvider(sampler, resource, shutdown_on_exit=False)


def make_otlp_provider(settings: TracingSettings, instance_id: str) -> TracerProvider:
    """A provider that sends spans to the settings' endpoint, from a thread of its own."""
    provider = make_provider(settings, instance_id)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(settings.endpoint)))
    return provider


class OtelTracer:
    """Implements RequestTracer."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tessera")

    def begin(self, record: RequestRecord, traceparent: str, tracestate: str) -> RequestSpan:
        carrier = {"traceparent": traceparent, "tracestate": tracestate}
        span = self._tracer.start_span(
            f"{record.protocol} request",
            _PROPAGATOR.extract(carrier) if traceparent else None,
            SpanKind.SERVER,
            start_time=record.started_ns,
        )
        return _OtelSpan(self._tracer, span)

    def close(self) -> None:
        self._provider.shutdown()


class _OtelSpan:
    """Implements RequestSpan."""

    def __init__(self, tracer: trace.Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        context = span.get_span_context()
        self.trace_id = trace.format_trace_id(context.trace_id)
        span_id = trace.format_span_id(context.span_id)
        self.traceparent = f"00-{self.trace_id}-{span_id}-{context.trace_flags:02x}"

    def finish(self, record: RequestRecord) -> None:
        if self._span.is_recording():
            self._describe(record)
            for route in record.routes:
                self._add_route(record, route)
            for choice in record.choices:
                self._add_choice(record, choice)
        self._span.end(record.unix_ns(record.ended_s))

    def _describe(self, record: RequestRecord) -> None:
        span = self._span
        span.update_name(f"{record.method} {record.route}".strip())
        span.set_attributes(_server_attributes(record))
        if record.error_code:
            span.set_attribute("error.type", record.error_code)
            if record.error_code in _SERVER_ERRORS:
                span.set_status(Status(StatusCode.ERROR, record.error_code))

    def _add_route(self, record: RequestRecord, route: RouteTimes) -> None:
        attributes = {
            "tessera.replica.id": route.replica_id,
            "tessera.routing.reason": route.reason,
        }
        ends = (route.started_s, route.ended_s)
        self._add(record, self._span, "tessera.route", ends, attributes)

    def _add_choice(self, record: RequestRecord, choice: ChoiceTimes) -> None:
        attributes: Attributes = {
            "tessera.finish_reason": choice.reason,
            "gen_ai.usage.output_tokens": choice.num_output_tokens,
        }
        ends = (choice.submitted_s, choice.ended_s)
        is_error = choice.reason in _SERVER_ERRORS
        channel = self._add(record, self._span, "tessera.channel", ends, attributes, is_error)
        first_s = choice.first_output_s
        if first_s is not None:
            # What the channel took, both ways, is the gap before the queue.
            prefill_s = max(choice.submitted_s, first_s - choice.prefill_s)
            queue_s = max(choice.submitted_s, prefill_s - choice.queue_s)
            self._add(record, channel, "tessera.engine.queue", (queue_s, prefill_s), {})
            self._add(record, channel, "tessera.engine.prefill", (prefill_s, first_s), {})
            self._add(record, channel, "tessera.engine.decode", (first_s, choice.ended_s), {})

    def _add(
        self,
        record: RequestRecord,
        parent: Span,
        name: str,
        ends: tuple[float, float],
        attributes: Attributes,
        is_error: bool = False,
    ) -> Span:
        """A span that lasted from one moment to another, both in the past."""
        span = self._tracer.start_span(
            name,
            trace.set_span_in_context(parent),
            attributes=attributes,
            start_time=record.unix_ns(ends[0]),
        )
        if is_error:
            span.set_status(Status(StatusCode.ERROR))
        span.end(record.unix_ns(ends[1]))
        return span


def _server_attributes(record: RequestRecord) -> Attributes:
    attributes: dict[str, str | int | float | tuple[str, ...]] = {
        "tessera.request.id": record.request_id
    }
    if record.protocol == "http":
        attributes["http.request.method"] = record.method
        attributes["http.route"] = record.route
        if record.status:
            attributes["http.response.status_code"] = int(record.status)
    else:
        attributes["rpc.system"] = "grpc"
        attributes["rpc.service"], _, attributes["rpc.method"] = record.route[1:].partition("/")
        attributes["tessera.grpc.status"] = record.status
    if record.model:
        attributes["gen_ai.operation.name"] = _OPERATIONS.get(record.route, "text_completion")
        attributes["gen_ai.provider.name"] = "tessera"
        attributes["gen_ai.request.model"] = record.model
        attributes["gen_ai.response.model"] = record.model
        attributes["gen_ai.usage.input_tokens"] = record.num_prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = record.num_output_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = record.num_cached_tokens
        reasons = tuple(choice.reason for choice in record.choices)
        attributes["gen_ai.response.finish_reasons"] = reasons
    return attributes
