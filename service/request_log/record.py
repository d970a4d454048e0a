"""RequestRecord: what the layers note about one request, for its log line and its spans.

The API servers put a record into the call's context; whoever learns something writes it there, a
few times per request and never per token. Knows no logging, no OpenTelemetry and no transport.
"""

import time
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol


class RequestSpan(Protocol):
    """The trace of one request. trace_id, traceparent: "" where there is none."""

    @property
    def trace_id(self) -> str: ...

    @property
    def traceparent(self) -> str: ...

    def finish(self, record: "RequestRecord") -> None:
        """Called once, when the record is complete."""


class NoSpan:
    """The span of every request where nothing is traced."""

    trace_id = ""
    traceparent = ""

    def finish(self, record: "RequestRecord") -> None:
        """Nothing to tell."""


NO_SPAN = NoSpan()


@dataclass(frozen=True, slots=True)
class RouteTimes:
    """One decision of the router; several for an engine request that was retried. Monotonic s."""

    replica_id: str
    reason: str
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class ChoiceTimes:
    """One engine request from its submission to its end. Monotonic seconds.

    first_output_s: None if it ended without output; queue_s and prefill_s, which the engine
    measured, mean nothing then. reason: as RequestMetrics.on_finished gets it.
    """

    submitted_s: float
    first_output_s: float | None
    ended_s: float
    queue_s: float
    prefill_s: float
    reason: str
    num_output_tokens: int


@dataclass(slots=True)
class RequestRecord:
    """protocol: "http" or "grpc". status: of HTTP, or the name of gRPC's; "" while unknown.

    error_code: of the ApiError that the client was told; "" for none. caller: the name of its API
    key, never the key. started_s is monotonic, started_ns Unix time; both of the same moment.
    """

    request_id: str = ""
    protocol: str = ""
    method: str = ""
    route: str = ""
    status: str = ""
    error_code: str = ""
    caller: str = ""
    model: str = ""
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    span: RequestSpan = NO_SPAN
    routes: list[RouteTimes] = field(default_factory=list)
    choices: list[ChoiceTimes] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)
    ended_s: float = 0.0

    @property
    def first_output_s(self) -> float | None:
        """Monotonic seconds of the first output of any choice."""
        known = [c.first_output_s for c in self.choices if c.first_output_s is not None]
        return min(known, default=None)

    def unix_ns(self, monotonic_s: float) -> int:
        """Unix time of a moment, by this record's two clocks."""
        return self.started_ns + round((monotonic_s - self.started_s) * 1e9)


_current: ContextVar[RequestRecord] = ContextVar("tessera_request_record")


def current_record() -> RequestRecord:
    """Of the call under way; outside of calls a new one that nobody reads."""
    record = _current.get(None)
    return RequestRecord() if record is None else record


def known_record() -> RequestRecord | None:
    """Of the call under way, if one is."""
    return _current.get(None)


def set_record(record: RequestRecord) -> None:
    """For the rest of the call under way and the tasks that it starts."""
    _current.set(record)
