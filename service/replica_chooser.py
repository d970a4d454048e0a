"""Puts a request's session, its cached prefix and the replicas' loads together, and remembers.

Runs on the ingress's event loop. Knows no links: the router sends, and tells what became of it.
"""

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from service.channel.load import LoadView
from service.prefix_index import Evicted, PrefixIndex, PrefixUse
from service.routing_policy import (
    HOMELESS,
    Candidate,
    Decision,
    RouterSettings,
    RoutingPolicy,
    SessionHome,
    load_in_queued_tokens,
)
from service.session import NO_SESSION
from service.session_table import SessionTable, rendezvous
from workers.protocol import GenerateRequest


class Choice(NamedTuple):
    """A decision and what to remember if it is carried out. matched_tokens: of the prompt, that
    the replica probably holds. uncached_tokens: the others."""

    decision: Decision
    keys: list[bytes]
    matched_tokens: int
    uncached_tokens: int
    session_key: bytes


@dataclass(slots=True)
class _Sent:
    """A request that a replica has. pending_tokens: 0 from its first output on."""

    replica_id: str
    pending_tokens: int
    use: PrefixUse


class ReplicaChooser:
    """choose(), send, on_sent(); then on_first_output() and on_end(), whatever becomes of it.

    A replica's report counts a prompt token as done when its step has been planned; a request of
    this ingress counts here until its first output has come back. The greater of both is the queue.
    """

    def __init__(
        self,
        settings: RouterSettings,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = PrefixIndex(
            settings.prefix_block_tokens, settings.max_prefix_blocks, settings.max_match_tokens
        )
        self._policy = RoutingPolicy(settings, rng)
        self._sessions = SessionTable(settings.max_sessions, settings.session_idle_s, clock)
        self._sent: dict[str, _Sent] = {}
        self._pending_tokens: dict[str, int] = {}

    def choose(
        self,
        request: GenerateRequest,
        loads: Mapping[str, LoadView],
        session_key: bytes = NO_SESSION,
    ) -> Choice:
        """loads, by replica, must not be empty."""
        keys = self._index.keys(request.prompt_token_ids, request.cache_salt)
        evicted = {
            name: Evicted(load.evicted_ordinary, load.evicted_shared)
            for name, load in loads.items()
        }
        matched = self._index.match(keys, evicted)
        num_prompt_tokens = len(request.prompt_token_ids)
        decision = self._policy.choose(
            [
                Candidate(
                    replica_id, self._load_tokens(replica_id, load), matched.get(replica_id, 0)
                )
                for replica_id, load in loads.items()
            ],
            num_prompt_tokens,
            self._home(session_key, loads),
        )
        matched_tokens = matched.get(decision.replica_id, 0)
        return Choice(
            decision, keys, matched_tokens, num_prompt_tokens - matched_tokens, session_key
        )

    def on_sent(self, request_id: str, choice: Choice) -> None:
        """A request sent again, elsewhere, counts there only."""
        self.on_end(request_id, 0)
        replica_id = choice.decision.replica_id
        use = self._index.insert(choice.keys, replica_id, choice.matched_tokens)
        self._sent[request_id] = _Sent(replica_id, choice.uncached_tokens, use)
        self._add(replica_id, choice.uncached_tokens)
        if choice.session_key:
            self._sessions.settle(choice.session_key, replica_id)

    def on_first_output(self, request_id: str) -> None:
        """Unknown ids are ignored."""
        sent = self._sent.get(request_id)
        if sent is not None:
            self._add(sent.replica_id, -sent.pending_tokens)
            sent.pending_tokens = 0

    def on_end(self, request_id: str, written_tokens: int) -> None:
        """written_tokens: by the replica's LoadView, 0 if it is lost. Unknown ids are ignored."""
        self.on_first_output(request_id)
        sent = self._sent.pop(request_id, None)
        if sent is not None:
            sent.use.released_at = written_tokens

    def forget(self, replica_id: str) -> None:
        """The replica is gone, and its cache with it."""
        self._index.forget(replica_id)

    def _home(self, session_key: bytes, loads: Mapping[str, LoadView]) -> SessionHome:
        if not session_key:
            return HOMELESS
        known = self._sessions.find(session_key)
        if known in loads:
            return SessionHome(known, is_known=True)
        return SessionHome(rendezvous(session_key, loads), is_known=False)

    def _load_tokens(self, replica_id: str, load: LoadView) -> int:
        queued_tokens = max(load.queued_tokens, self._pending_tokens.get(replica_id, 0))
        return load_in_queued_tokens(queued_tokens, load.running_tokens)

    def _add(self, replica_id: str, num_tokens: int) -> None:
        total = self._pending_tokens.get(replica_id, 0) + num_tokens
        if total:
            self._pending_tokens[replica_id] = total
        else:
            self._pending_tokens.pop(replica_id, None)
