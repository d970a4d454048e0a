"""Which replica gets a request: cached prefix against load, power of two choices without a match.

A pure function of its candidates and an injected random source. Knows no sockets and no index.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field


class RoutingReason(StrEnum):
    """Why a replica was chosen. RETRY: the first replica was lost or refused."""

    ONLY = "only"
    PREFIX = "prefix"
    LOAD = "load"
    RETRY = "retry"


class RouterSettings(BaseModel):
    """How requests are spread over replicas.

    prefix_block_tokens: granularity of prefix matching. max_prefix_blocks: blocks the index
    remembers, per ingress. max_match_tokens: how far into a prompt it looks. min_match_tokens:
    shorter matches count as none. imbalance_tokens: how many more tokens than the least loaded
    replica the matching one may have, beyond the matched tokens, before load decides.
    max_waiting_requests, max_queued_tokens: a replica with more than either is full.
    retry_wait_s: how long a request whose replica was lost before its first output waits for
    another one to take it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix_block_tokens: int = Field(default=64, ge=1)
    max_prefix_blocks: int = Field(default=1 << 16, ge=1)
    max_match_tokens: int = Field(default=1 << 15, ge=1)
    min_match_tokens: int = Field(default=64, ge=1)
    imbalance_tokens: int = Field(default=8192, ge=0)
    max_waiting_requests: int = Field(default=2048, ge=1)
    max_queued_tokens: int = Field(default=1 << 21, ge=1)
    retry_wait_s: float = Field(default=30.0, ge=0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may take the request. load_tokens: queued and running tokens together."""

    replica_id: str
    load_tokens: int
    matched_tokens: int


class Decision(NamedTuple):
    """The replica chosen and why."""

    replica_id: str
    reason: RoutingReason


class RoutingPolicy:
    """The matching replica wins unless its extra load outweighs the prefill that it saves."""

    def __init__(self, settings: RouterSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng

    def choose(self, candidates: Sequence[Candidate]) -> Decision:
        """candidates must not be empty."""
        if len(candidates) == 1:
            return Decision(candidates[0].replica_id, RoutingReason.ONLY)
        best = max(candidates, key=lambda c: (c.matched_tokens, -c.load_tokens))
        if best.matched_tokens >= self._settings.min_match_tokens:
            least_tokens = min(c.load_tokens for c in candidates)
            extra_tokens = best.load_tokens - least_tokens
            if extra_tokens <= best.matched_tokens + self._settings.imbalance_tokens:
                return Decision(best.replica_id, RoutingReason.PREFIX)
        first, second = self._rng.sample(candidates, 2)
        lighter = first if first.load_tokens <= second.load_tokens else second
        return Decision(lighter.replica_id, RoutingReason.LOAD)
