"""RequestRecord: what the layers note about one request, for its log line and its spans.

It travels in the RequestContext; whoever learns something writes it there, a few times per request
and never per token. Knows no logging, no OpenTelemetry and no transport.
"""

import time
from dataclasses import dataclass, field
from typing import Protocol

MAX_KEPT_MOVES = 64
"""In a record: a stream that lives for hours may be moved without end."""


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
    """One decision of the router; several for an engine request that was moved. Monotonic s.

    is_move: another replica had the request before.
    """

    replica_id: str
    reason: str
    started_s: float
    ended_s: float
    is_move: bool = False


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
    key, never the key; who has none is anonymous. is_accepted: a replica has got it. routes: only
    add_route() adds any. num_moves: how often an engine request of this one was sent to yet another
    replica. started_s is monotonic, started_ns Unix time; both of the same moment.
    """

    request_id: str = ""
    protocol: str = ""
    method: str = ""
    route: str = ""
    status: str = ""
    error_code: str = ""
    caller: str = "anonymous"
    model: str = ""
    is_accepted: bool = False
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    span: RequestSpan = NO_SPAN
    routes: list[RouteTimes] = field(default_factory=list)
    num_moves: int = 0
    choices: list[ChoiceTimes] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)
    ended_s: float = 0.0

    @property
    def first_output_s(self) -> float | None:
        """Monotonic seconds of the first output of any choice."""
        known = [c.first_output_s for c in self.choices if c.first_output_s is not None]
        return min(known, default=None)

    def add_route(self, route: RouteTimes) -> None:
        """Of the moves only the first MAX_KEPT_MOVES are kept; all are counted."""
        self.num_moves += route.is_move
        if not route.is_move or self.num_moves <= MAX_KEPT_MOVES:
            self.routes.append(route)

    def unix_ns(self, monotonic_s: float) -> int:
        """Unix time of a moment, by this record's two clocks."""
        return self.started_ns + round((monotonic_s - self.started_s) * 1e9)
