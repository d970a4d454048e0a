"""Which replica gets a request: its session's or a cached prefix's against load, else least work.

A pure function of its candidates and an injected random source. Knows no sockets and no index.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from service.autoscaling.settings import WaitingSettings

SPILL_FACTOR = 6
"""A match keeps its replica for this many times the load that it saves: a copy elsewhere costs
the prefill and then memory, too."""
MIN_MATCH_SHARE = 0.25
"""Of the prompt. A shorter match, such as an instruction that every prompt begins with, does not
bind a request to a replica."""
RUNNING_TOKENS_PER_QUEUED = 32
"""Tokens in KV memory that delay others as much as one prompt token that is still to compute."""

SESSION_HEADER_PATTERN = r"^x-[a-z0-9-]{0,61}[a-z0-9]$"
"""Lower case as in gRPC metadata. Headers that mean something else do not begin so."""


class RoutingReason(StrEnum):
    """Why a request was sent to a replica: how that one was chosen or, in MOVES, why its replica
    before that has it no longer. LOST: it is gone. REFUSED: it was full. DRAIN: it leaves. SLEEP:
    it was told to sleep. SPREAD: the request waited there, and another replica has come."""

    ONLY = "only"
    SESSION = "session"
    PREFIX = "prefix"
    LOAD = "load"
    LOST = "lost"
    REFUSED = "refused"
    DRAIN = "drain"
    SLEEP = "sleep"
    SPREAD = "spread"


MOVES = frozenset(
    {
        RoutingReason.LOST,
        RoutingReason.REFUSED,
        RoutingReason.DRAIN,
        RoutingReason.SLEEP,
        RoutingReason.SPREAD,
    }
)
"""What sends a request to another replica, with the output that it has."""


class RouterSettings(BaseModel):
    """How requests are spread over replicas.

    prefix_block_tokens: granularity of prefix matching. max_prefix_blocks: blocks the index
    remembers, per ingress. max_match_tokens: how far into a prompt it looks. min_match_tokens:
    shorter matches count as none. imbalance_tokens: how much more load than the least loaded
    replica the matching one may have, beyond SPILL_FACTOR times the match, before load decides.
    session_header: the HTTP header and gRPC metadata key that names a request's session.
    session_imbalance_tokens: how much more load than the least loaded replica a session's own may
    have, beyond SPILL_FACTOR times the prompt. max_sessions, session_idle_s: how many are
    remembered, per ingress, and for how long after their last request.
    max_waiting_requests, max_queued_tokens: a replica with more than either is full.
    max_losses: lost replicas that may count against one request; the loss of the last one ends it.
    From the second on it is tried alone (service/routing/suspects.py). max_moves: how often in a
    row, without an answer in between, a request that its replica refuses is sent to another one at
    once. move_wait_s: how long a request that stands still waits for a replica to be there; who is
    tried alone may wait half as long again for its turn.
    max_handovers: how many requests of replicas that drain are on their way to others at the same
    time, per ingress; 0 lets them end where they
    are. scale_up: waiting for a model that was scaled to zero.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    prefix_block_tokens: int = Field(default=64, ge=1)
    max_prefix_blocks: int = Field(default=1 << 16, ge=1)
    max_match_tokens: int = Field(default=1 << 15, ge=1)
    min_match_tokens: int = Field(default=64, ge=1)
    imbalance_tokens: int = Field(default=0, ge=0)
    session_header: str = Field(default="x-session-id", pattern=SESSION_HEADER_PATTERN)
    session_imbalance_tokens: int = Field(default=4096, ge=0)
    max_sessions: int = Field(default=1 << 16, ge=1)
    session_idle_s: float = Field(default=3600.0, gt=0)
    max_waiting_requests: int = Field(default=2048, ge=1)
    max_queued_tokens: int = Field(default=1 << 21, ge=1)
    max_losses: int = Field(default=8, ge=1)
    max_moves: int = Field(default=3, ge=0)
    move_wait_s: float = Field(default=60.0, ge=0)
    max_handovers: int = Field(default=8, ge=0)
    scale_up: WaitingSettings = WaitingSettings()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may take the request. load_tokens: see load_in_queued_tokens."""

    replica_id: str
    load_tokens: int
    matched_tokens: int


class SessionHome(NamedTuple):
    """Where a session belongs. is_known: it was sent there before; otherwise any replica would do,
    and all ingresses name the same one. replica_id "": the request has no session."""

    replica_id: str
    is_known: bool


HOMELESS = SessionHome("", is_known=False)


class Decision(NamedTuple):
    """The replica chosen and why."""

    replica_id: str
    reason: RoutingReason


def load_in_queued_tokens(queued_tokens: int, running_tokens: int) -> int:
    """What is between a new request and its first token, as prompt tokens to compute."""
    return queued_tokens + running_tokens // RUNNING_TOKENS_PER_QUEUED


class RoutingPolicy:
    """A session's replica wins, then the matching one, unless its extra load outweighs what it
    saves; a home that a session has not been sent to yet comes after the match.

    Otherwise the replica with the least load and uncached prompt tokens together, ties at random.
    """

    def __init__(self, settings: RouterSettings, rng: random.Random) -> None:
        self._settings = settings
        self._rng = rng

    def choose(
        self,
        candidates: Sequence[Candidate],
        num_prompt_tokens: int,
        session: SessionHome = HOMELESS,
    ) -> Decision:
        """candidates must not be empty."""
        if len(candidates) == 1:
            return Decision(candidates[0].replica_id, RoutingReason.ONLY)
        least = min(candidates, key=self._work_and_chance)
        home = next((c for c in candidates if c.replica_id == session.replica_id), None)
        can_stay = home is not None and self._can_stay(home, candidates, num_prompt_tokens)
        if can_stay and session.is_known:
            return Decision(session.replica_id, RoutingReason.SESSION)
        best = max(candidates, key=lambda c: (c.matched_tokens, -c.load_tokens))
        if self._is_bound(best, least, num_prompt_tokens):
            return Decision(best.replica_id, RoutingReason.PREFIX)
        if can_stay:
            return Decision(session.replica_id, RoutingReason.SESSION)
        return Decision(least.replica_id, RoutingReason.LOAD)

    def _can_stay(
        self, home: Candidate, candidates: Sequence[Candidate], num_prompt_tokens: int
    ) -> bool:
        """A session's replica is taken to hold all that its prompt repeats."""
        least_tokens = min(candidate.load_tokens for candidate in candidates)
        allowed_tokens = SPILL_FACTOR * num_prompt_tokens + self._settings.session_imbalance_tokens
        return home.load_tokens - least_tokens <= allowed_tokens

    def _is_bound(self, best: Candidate, least: Candidate, num_prompt_tokens: int) -> bool:
        min_tokens = max(self._settings.min_match_tokens, MIN_MATCH_SHARE * num_prompt_tokens)
        if best.matched_tokens < min_tokens:
            return False
        saved_tokens = best.matched_tokens - least.matched_tokens
        allowed_tokens = SPILL_FACTOR * saved_tokens + self._settings.imbalance_tokens
        return best.load_tokens - least.load_tokens <= allowed_tokens

    def _work_and_chance(self, candidate: Candidate) -> tuple[int, float]:
        return candidate.load_tokens - candidate.matched_tokens, self._rng.random()
