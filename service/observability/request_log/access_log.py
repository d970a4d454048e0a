"""AccessLog: one line for each request that ended, written in batches by a thread of its own.

The event loop that streams tokens only hands records over: it neither formats nor waits for
whoever reads standard error. A process that is killed loses the lines of its last tenth of a
second. Knows a record's fields and nothing of what the request says.
"""

import logging
import threading
from collections import deque
from typing import Any

from service.observability.request_log.formatting import FIELDS
from service.observability.request_log.record import RequestRecord

logger = logging.getLogger(__name__)

INTERVAL_S = 0.1
MAX_WAITING_LINES = 65_536


class AccessLog:
    """add() from one thread; flush() and close() from any."""

    def __init__(
        self, interval_s: float = INTERVAL_S, max_waiting: int = MAX_WAITING_LINES
    ) -> None:
        self._interval_s = interval_s
        self._max_waiting = max_waiting
        self._waiting: deque[RequestRecord] = deque()
        self._num_dropped = 0
        self._has_lines = threading.Event()
        self._closed = threading.Event()
        self._writing = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="access-log", daemon=True)

    def add(self, record: RequestRecord) -> None:
        """record: complete, and not changed any more."""
        if len(self._waiting) >= self._max_waiting:
            self._num_dropped += 1
            return
        self._waiting.append(record)
        if not self._has_lines.is_set():
            self._has_lines.set()
            if self._thread.ident is None:
                self._thread.start()

    def flush(self) -> None:
        """Write every line that waits."""
        with self._writing:
            while self._waiting:
                _write(self._waiting.popleft())
            num_dropped, self._num_dropped = self._num_dropped, 0
        if num_dropped:
            logger.warning("%d lines of ended requests were dropped: too many waited", num_dropped)

    def close(self) -> None:
        """Write what waits; what is added afterwards is not written."""
        self._closed.set()
        self._has_lines.set()
        if self._thread.ident is not None:
            self._thread.join()
        self.flush()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._has_lines.wait()
            self._closed.wait(self._interval_s)
            # Cleared before lines are taken: one that comes meanwhile sets it again.
            self._has_lines.clear()
            self.flush()


def _write(record: RequestRecord) -> None:
    """The line has the time of the request's end, whenever it is written."""
    ended_s = record.unix_ns(record.ended_s) / 1e9
    line = {
        "name": logger.name,
        "levelno": logging.INFO,
        "levelname": "INFO",
        "msg": "request ended",
        "created": ended_s,
        "msecs": ended_s % 1 * 1e3,
        FIELDS: access_fields(record),
    }
    if logger.isEnabledFor(logging.INFO):
        logger.handle(logging.makeLogRecord(line))


def access_fields(record: RequestRecord) -> dict[str, Any]:
    """What the line says, in its order."""
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "protocol": record.protocol,
        "method": record.method,
        "route": record.route,
        "status": record.status,
        "key_name": record.caller,
        "duration_s": round(record.ended_s - record.started_s, 6),
    }
    if record.span.trace_id:
        fields["trace_id"] = record.span.trace_id
    if record.error_code:
        fields["error_code"] = record.error_code
    if record.model:
        fields["model"] = record.model
    if record.is_accepted:
        fields |= {
            "num_prompt_tokens": record.num_prompt_tokens,
            "num_cached_tokens": record.num_cached_tokens,
            "num_output_tokens": record.num_output_tokens,
            "finish_reason": ",".join(choice.reason for choice in record.choices),
        }
    if record.num_moves:
        fields["num_moves"] = record.num_moves
    first_s = record.first_output_s
    if first_s is not None:
        fields["ttft_s"] = round(first_s - record.started_s, 6)
        fields["queue_s"] = round(max(choice.queue_s for choice in record.choices), 6)
    return fields
