"""Puts a request's session, its cached prefix and the replicas' loads together, and remembers.

Runs on the ingress's event loop. Knows no links: the router sends, and tells what became of it.
"""

import random
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from service.channel.load import LoadView
from service.routing.policy import (
    HOMELESS,
    Candidate,
    Decision,
    RouterSettings,
    RoutingPolicy,
    SessionHome,
    load_in_queued_tokens,
)
from service.routing.prefix_index import Evicted, PrefixIndex, PrefixUse
from service.routing.session import NO_SESSION
from service.routing.session_table import SessionTable, rendezvous
from service.routing.token_ledger import TokenLedger
from workers.engine.protocol import GenerateRequest


class Choice(NamedTuple):
    """A decision and what to remember if it is carried out. matched_tokens: of prompt and output so
    far, that the replica probably holds. uncached_tokens: the others."""

    decision: Decision
    keys: list[bytes]
    matched_tokens: int
    uncached_tokens: int
    session_key: bytes


class ReplicaChooser:
    """choose(), send, on_sent(); then on_end(), whatever becomes of it.

    A replica's report counts a prompt token as done when its step has been planned; in the ledger a
    request of this ingress counts until its first output has come back. The greater of both is the
    queue.
    """

    def __init__(
        self,
        settings: RouterSettings,
        ledger: TokenLedger,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._index = PrefixIndex(
            settings.prefix_block_tokens, settings.max_prefix_blocks, settings.max_match_tokens
        )
        self._policy = RoutingPolicy(settings, rng)
        self._sessions = SessionTable(settings.max_sessions, settings.session_idle_s, clock)
        self._ledger = ledger
        self._uses: dict[str, PrefixUse] = {}

    def ignore_prefixes(self) -> None:
        """The model's replicas have no prefix cache: nothing is matched from here on."""
        settings = self._settings
        self._index = PrefixIndex(settings.prefix_block_tokens, settings.max_prefix_blocks, 0)

    def choose(
        self,
        request: GenerateRequest,
        loads: Mapping[str, LoadView],
        session_key: bytes = NO_SESSION,
    ) -> Choice:
        """loads, by replica, must not be empty."""
        # Behind unlike inputs of an encoder equal tokens have nothing in common.
        token_ids = request.known_token_ids if request.encoder_input is None else []
        keys = self._index.keys(token_ids, request.prefix_salt, request.content_spans)
        evicted = {
            name: Evicted(load.evicted_ordinary, load.evicted_shared)
            for name, load in loads.items()
        }
        matched = self._index.match(keys, evicted)
        decision = self._policy.choose(
            [
                Candidate(
                    replica_id, self._load_tokens(replica_id, load), matched.get(replica_id, 0)
                )
                for replica_id, load in loads.items()
            ],
            request.num_input_tokens,
            self._home(session_key, loads),
        )
        matched_tokens = matched.get(decision.replica_id, 0)
        num_uncached = request.num_input_tokens - matched_tokens
        return Choice(decision, keys, matched_tokens, num_uncached, session_key)

    def on_sent(self, request_id: str, choice: Choice) -> None:
        """A request sent again, elsewhere, counts there only."""
        self._release(request_id, 0)
        replica_id = choice.decision.replica_id
        use = self._index.insert(choice.keys, replica_id, choice.matched_tokens)
        self._uses[request_id] = use
        if choice.session_key:
            self._sessions.settle(choice.session_key, replica_id)

    def on_end(self, request_id: str, written_tokens: int) -> None:
        """written_tokens: by the replica's LoadView, 0 if it is lost. Unknown ids are ignored."""
        self._release(request_id, written_tokens)

    def forget(self, replica_id: str) -> None:
        """The replica is gone, and its cache with it."""
        self._index.forget(replica_id)

    def _release(self, request_id: str, written_tokens: int) -> None:
        use = self._uses.pop(request_id, None)
        if use is not None:
            use.released_at = written_tokens

    def _home(self, session_key: bytes, loads: Mapping[str, LoadView]) -> SessionHome:
        if not session_key:
            return HOMELESS
        known = self._sessions.find(session_key)
        if known in loads:
            return SessionHome(known, is_known=True)
        return SessionHome(rendezvous(session_key, loads), is_known=False)

    def _load_tokens(self, replica_id: str, load: LoadView) -> int:
        queue = self._ledger.at(replica_id)
        queued_tokens = max(load.queued_tokens + queue.unseen_tokens, queue.uncached_tokens)
        return load_in_queued_tokens(queued_tokens, load.running_tokens)
