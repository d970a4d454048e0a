"""Which replica gets a request: cached prefix against load, the least work without a match.

A pure function of its candidates and an injected random source. Knows no sockets and no index.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

SPILL_FACTOR = 6
"""A match keeps its replica for this many times the load that it saves: a copy elsewhere costs
the prefill and then memory, too."""
MIN_MATCH_SHARE = 0.25
"""Of the prompt. A shorter match, such as an instruction that every prompt begins with, does not
bind a request to a replica."""
RUNNING_TOKENS_PER_QUEUED = 16
"""Tokens in KV memory that delay others as much as one prompt token that is still to compute."""


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
    shorter matches count as none. imbalance_tokens: how much more load than the least loaded
    replica the matching one may have, beyond SPILL_FACTOR times the match, before load decides.
    max_waiting_requests, max_queued_tokens: a replica with more than either is full.
    retry_wait_s: how long a request whose replica was lost before its first output waits for
    another one to take it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix_block_tokens: int = Field(default=64, ge=1)
    max_prefix_blocks: int = Field(default=1 << 16, ge=1)
    max_match_tokens: int = Field(default=1 << 15, ge=1)
    min_match_tokens: int = Field(default=64, ge=1)
    imbalance_tokens: int = Field(default=0, ge=0)
    max_waiting_requests: int = Field(default=2048, ge=1)
    max_queued_tokens: int = Field(default=1 << 21, ge=1)
    retry_wait_s: float = Field(default=30.0, ge=0)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may take the request. load_tokens: see load_in_queued_tokens."""

    replica_id: str
    load_tokens: int
    matched_tokens: int


class Decision(NamedTuple):
    """The replica chosen and why."""

    replica_id: str
    reason: RoutingReason


def load_in_queued_tokens(queued_tokens: int, running_tokens: int) -> int:
    """What is between a new request and its first token, as prompt tokens to compute."""
    return queued_tokens + running_tokens // RUNNING_TOKENS_PER_QUEUED


class RoutingPolicy:
    """The matching replica wins unless its extra load outweighs what the match saves.

    Otherwise the replica with the least load and uncached prompt tokens together, ties at random.
    """

    def __init__(self, settings: RouterSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng

    def choose(self, candidates: Sequence[Candidate], num_prompt_tokens: int) -> Decision:
        """candidates must not be empty."""
        if len(candidates) == 1:
            return Decision(candidates[0].replica_id, RoutingReason.ONLY)
        best = max(candidates, key=lambda c: (c.matched_tokens, -c.load_tokens))
        least = min(candidates, key=self._work_and_chance)
        if self._is_bound(best, least, num_prompt_tokens):
            return Decision(best.replica_id, RoutingReason.PREFIX)
        return Decision(least.replica_id, RoutingReason.LOAD)

    def _is_bound(self, best: Candidate, least: Candidate, num_prompt_tokens: int) -> bool:
        min_tokens = max(self._settings.min_match_tokens, MIN_MATCH_SHARE * num_prompt_tokens)
        if best.matched_tokens < min_tokens:
            return False
        saved_tokens = best.matched_tokens - least.matched_tokens
        allowed_tokens = SPILL_FACTOR * saved_tokens + self._settings.imbalance_tokens
        return best.load_tokens - least.load_tokens <= allowed_tokens

    def _work_and_chance(self, candidate: Candidate) -> tuple[int, float]:
        return candidate.load_tokens - candidate.matched_tokens, self._rng.random()
