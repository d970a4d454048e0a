"""RequestObserver: begins a record when a request arrives; logs and traces it when it ends.

Knows the record's fields and nothing of what the request says. Used by both API servers.
"""

import re
import time
import uuid
from typing import Protocol

from service.observability.request_log.access_log import AccessLog
from service.observability.request_log.formatting import name_in_log_lines
from service.observability.request_log.record import NO_SPAN, RequestRecord, RequestSpan

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
        self._access_log = AccessLog() if is_access_log_enabled else None

    def begin(self, record: RequestRecord, traceparent: str = "", tracestate: str = "") -> None:
        """The request of the call under way has arrived."""
        record.span = self._tracer.begin(record, traceparent, tracestate)
        name_in_log_lines(record)

    def end(self, record: RequestRecord) -> None:
        """Call once, when the last byte was sent or the client had left."""
        record.ended_s = time.monotonic()
        record.span.finish(record)
        if self._access_log is not None:
            self._access_log.add(record)

    def flush(self) -> None:
        """Write the lines of the requests that have ended; may block."""
        if self._access_log is not None:
            self._access_log.flush()

    def close(self) -> None:
        """Send and write what is left, after the last request; may block for some seconds."""
        if self._access_log is not None:
            self._access_log.close()
        self._tracer.close()


SILENT = RequestObserver(NoTracing(), is_access_log_enabled=False)


def choose_request_id(given: str) -> str:
    """The client's id if it is well-formed, else a new one."""
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
