"""Log lines as text or JSON, each with the id of the request that it is about.

Formatters run where the line is logged, so the call's context names the request. Knows no request's
content: what must not be logged is never given to a logger.
"""

import json
import logging
import sys
from contextvars import ContextVar
from datetime import UTC, datetime
from typing import Any

from service.observability.request_log.record import RequestRecord
from service.observability.request_log.settings import LoggingSettings

# A line's own fields, given as extra={FIELDS: {...}}.
FIELDS = "tessera_fields"
_encode = json.JSONEncoder(ensure_ascii=False, default=str).encode
_PACKAGES = ("service", "workers", "attention")
# For lines alone: a logger is given no request. Code is given its RequestContext.
_named: ContextVar[RequestRecord] = ContextVar("tessera_request_of_log_lines")


def name_in_log_lines(record: RequestRecord) -> None:
    """Lines of the call under way, and of the tasks that it starts, name this request."""
    _named.set(record)


class JsonFormatter(logging.Formatter):
    """One object a line: time (RFC 3339, UTC), level, logger, message, request_id, trace_id."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_request_fields(),
            **getattr(record, FIELDS, {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _encode(line)


class TextFormatter(logging.Formatter):
    """The same fields behind the message, as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's name
        fields = {**_request_fields(), **getattr(record, FIELDS, {})}
        pairs = (f" {name}={value}" for name, value in fields.items())
        return super().formatMessage(record) + "".join(pairs)


def configure_logging(settings: LoggingSettings) -> None:
    """Send this process's lines to standard error; calling it again replaces the format."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.format == "json" else TextFormatter())
    for package in _PACKAGES:
        logger = logging.getLogger(package)
        logger.handlers[:] = [handler]
        logger.setLevel(logging.INFO)
        logger.propagate = False


def _request_fields() -> dict[str, str]:
    record = _named.get(None)
    if record is None:
        return {}
    fields = {"request_id": record.request_id}
    if record.span.trace_id:
        fields["trace_id"] = record.span.trace_id
    return fields
