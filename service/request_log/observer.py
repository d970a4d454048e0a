"""RequestObserver: begins a record when a request arrives; logs and traces it when it ends.

Knows the record's fields and nothing of what the request says. Used by both API servers.
"""

import logging
import re
import time
import uuid
from typing import Any, Protocol

from service.request_log.formatting import FIELDS
from service.request_log.record import NO_SPAN, RequestRecord, RequestSpan, set_record
from service.security.callers import ANONYMOUS, current_caller, set_caller

logger = logging.getLogger(__name__)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:\-]{1,128}")


class RequestTracer(Protocol):
    """Makes spans. Thread-safe."""

    def begin(self, record: RequestRecord, traceparent: str, tracestate: str) -> RequestSpan:
        """traceparent, tracestate: as received; "" or malformed begins a trace of its own."""
        ...

    def close(self) -> None:
        """Send what has not been sent; may block for some seconds."""


class NoTracing:
    """Traces nothing and makes nothing."""

    def begin(self, record: RequestRecord, traceparent: str, tracestate: str) -> RequestSpan:
        return NO_SPAN

    def close(self) -> None:
        """Nothing was kept."""


class RequestObserver:
    """One per ingress process."""

    def __init__(self, tracer: RequestTracer, *, is_access_log_enabled: bool) -> None:
        self._tracer = tracer
        self._is_access_log_enabled = is_access_log_enabled

    def begin(
        self, record: RequestRecord, traceparent: str = "", tracestate: str = ""
    ) -> RequestRecord:
        """Make `record` the one of the call under way, which starts without a caller."""
        record.span = self._tracer.begin(record, traceparent, tracestate)
        set_record(record)
        set_caller(ANONYMOUS)
        return record

    def end(self, record: RequestRecord) -> None:
        """Call once, when the last byte was sent or the client had left."""
        record.ended_s = time.monotonic()
        record.caller = record.caller or current_caller().name
        record.span.finish(record)
        if self._is_access_log_enabled:
            logger.info("request ended", extra={FIELDS: _access_fields(record)})


SILENT = RequestObserver(NoTracing(), is_access_log_enabled=False)


def choose_request_id(given: str) -> str:
    """The client's id if it is well-formed, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _access_fields(record: RequestRecord) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "protocol": record.protocol,
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "key_name": record.caller,
        "duration_s": round(record.ended_s - record.started_s, 6),
    }
    if record.error_code:
        fields["error_code"] = record.error_code
    if record.model:
        fields |= {
            "model": record.model,
            "num_prompt_tokens": record.num_prompt_tokens,
            "num_cached_tokens": record.num_cached_tokens,
            "num_output_tokens": record.num_output_tokens,
            "finish_reason": ",".join(choice.reason for choice in record.choices),
        }
    first_s = record.first_output_s
    if first_s is not None:
        fields["ttft_s"] = round(first_s - record.started_s, 6)
        fields["queue_s"] = round(max(choice.queue_s for choice in record.choices), 6)
    return fields
