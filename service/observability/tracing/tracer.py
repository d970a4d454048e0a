"""Chooses the tracer that the settings ask for."""

from service.observability.request_log.observer import NoTracing, RequestTracer
from service.observability.tracing.settings import TracingSettings


def make_tracer(settings: TracingSettings, instance_id: str) -> RequestTracer:
    """Raises ConfigError if tracing is enabled and its packages are not installed."""
    if not settings.is_enabled:
        return NoTracing()
    settings.check()
    # An optional extra: without tracing nothing of OpenTelemetry is imported.
    from service.observability.tracing.otel import OtelTracer, make_otlp_provider

    return OtelTracer(make_otlp_provider(settings, instance_id))
