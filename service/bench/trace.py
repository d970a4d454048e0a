"""What one request went through, as the client saw it. Raw readings; statistics.py makes sense.

Kept in flat arrays because a run can hold millions of tokens. Knows no protocol.
"""

from array import array
from dataclasses import dataclass, field


class RequestFailedError(Exception):
    """The request ended with an error. code groups failures in the report."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(slots=True)
class RequestTrace:
    """Seconds are on one monotonic axis for the whole run.

    due_s: when the load pattern wanted it sent; latencies count from here, so that a late client
    cannot make a server look fast. events: deliveries of tokens, event_tokens[i] tokens at
    event_times_s[i]; 0 where the server does not say how many a delivery holds.
    num_input_tokens, num_output_tokens, num_cached_tokens: the server's own count.
    """

    due_s: float
    started_s: float = 0.0
    ended_s: float = 0.0
    event_times_s: "array[float]" = field(default_factory=lambda: array("d"))
    event_tokens: "array[int]" = field(default_factory=lambda: array("q"))
    num_input_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    error_code: str | None = None
    error_message: str = ""

    @property
    def is_ok(self) -> bool:
        return self.error_code is None

    def add_event(self, now_s: float, num_tokens: int) -> None:
        self.event_times_s.append(now_s)
        self.event_tokens.append(num_tokens)

    def fail(self, error: RequestFailedError) -> None:
        self.error_code = error.code
        self.error_message = error.message
