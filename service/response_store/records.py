"""What goes into a store of responses and what comes out. Plain values; JSON is opaque here."""

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True)
class ResponseName:
    """tenant: whose it is; nobody else gets it."""

    tenant: str
    response_id: str


@dataclass(frozen=True, slots=True)
class BegunResponse:
    """One under way. head: the response's JSON without its output. runner: the process that makes
    it, which hears of cancellations."""

    name: ResponseName
    model: str
    head: bytes
    runner: str


@dataclass(frozen=True, slots=True)
class EndedResponse:
    """head as in BegunResponse. input, output: JSON arrays of items; input: without those of the
    previous response, which previous_id names ("" for none)."""

    name: ResponseName
    model: str
    head: bytes
    input: bytes
    output: bytes
    previous_id: str = ""

    @property
    def num_bytes(self) -> int:
        return len(self.head) + len(self.input) + len(self.output)


class State(StrEnum):
    """LOST: the process that made it is gone. CANCELLING: it has been told to stop."""

    RUNNING = "running"
    CANCELLING = "cancelling"
    LOST = "lost"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """As in EndedResponse; input and output are empty arrays until it has ended."""

    state: State
    model: str
    head: bytes
    input: bytes
    output: bytes


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """num_*, *_bytes: of all responses together but max_response_bytes. ttl_s: of each, from when
    it ended."""

    max_responses: int
    max_total_bytes: int
    max_response_bytes: int
    ttl_s: float
