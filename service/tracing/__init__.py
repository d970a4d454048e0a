"""OpenTelemetry spans of requests. Only service.tracing.otel imports OpenTelemetry."""
