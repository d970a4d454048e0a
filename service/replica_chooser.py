"""Puts a request's cached prefix and the replicas' loads together, and remembers what was sent.

Runs on the ingress's event loop. Knows no links: the router sends, and tells what became of it.
"""

import random
from collections.abc import Mapping
from typing import NamedTuple

from service.channel.load import LoadView
from service.prefix_index import PrefixIndex
from service.routing_policy import (
    Candidate,
    Decision,
    RouterSettings,
    RoutingPolicy,
    load_in_queued_tokens,
)
from workers.protocol import GenerateRequest


class Choice(NamedTuple):
    """A decision and what to remember if it is carried out. uncached_tokens: prompt tokens that
    the replica probably has to compute."""

    decision: Decision
    keys: list[bytes]
    uncached_tokens: int


class ReplicaChooser:
    """choose(), send, on_sent(); then on_first_output() once, whatever becomes of the request.

    A replica's report counts a prompt token as done when its step has been planned; a request of
    this ingress counts here until its first output has come back. The greater of both is the queue.
    """

    def __init__(self, settings: RouterSettings, rng: random.Random) -> None:
        self._index = PrefixIndex(
            settings.prefix_block_tokens, settings.max_prefix_blocks, settings.max_match_tokens
        )
        self._policy = RoutingPolicy(settings, rng)
        self._pending: dict[str, tuple[str, int]] = {}
        self._pending_tokens: dict[str, int] = {}

    @property
    def num_pending(self) -> int:
        """Requests sent that have brought no output yet."""
        return len(self._pending)

    def choose(self, request: GenerateRequest, loads: Mapping[str, LoadView]) -> Choice:
        """loads, by replica, must not be empty."""
        keys = self._index.keys(request.prompt_token_ids, request.cache_salt)
        matched = self._index.match(keys, loads.keys())
        num_prompt_tokens = len(request.prompt_token_ids)
        decision = self._policy.choose(
            [
                Candidate(
                    replica_id, self._load_tokens(replica_id, load), matched.get(replica_id, 0)
                )
                for replica_id, load in loads.items()
            ],
            num_prompt_tokens,
        )
        return Choice(decision, keys, num_prompt_tokens - matched.get(decision.replica_id, 0))

    def on_sent(self, request_id: str, choice: Choice) -> None:
        """A request sent again, elsewhere, counts there only."""
        self.on_first_output(request_id)
        replica_id = choice.decision.replica_id
        self._index.insert(choice.keys, replica_id)
        self._pending[request_id] = (replica_id, choice.uncached_tokens)
        self._add(replica_id, choice.uncached_tokens)

    def on_first_output(self, request_id: str) -> None:
        """Or the end without one. Unknown ids are ignored."""
        replica_id, num_tokens = self._pending.pop(request_id, ("", 0))
        if num_tokens:
            self._add(replica_id, -num_tokens)

    def forget(self, replica_id: str) -> None:
        """The replica is gone, and its cache with it."""
        self._index.forget(replica_id)

    def _load_tokens(self, replica_id: str, load: LoadView) -> int:
        queued_tokens = max(load.queued_tokens, self._pending_tokens.get(replica_id, 0))
        return load_in_queued_tokens(queued_tokens, load.running_tokens)

    def _add(self, replica_id: str, num_tokens: int) -> None:
        total = self._pending_tokens.get(replica_id, 0) + num_tokens
        if total:
            self._pending_tokens[replica_id] = total
        else:
            self._pending_tokens.pop(replica_id, None)
