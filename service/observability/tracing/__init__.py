"""OpenTelemetry spans of requests. Only .otel imports OpenTelemetry."""
