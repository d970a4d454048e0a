"""The four policies that the routing benchmark compares, behind one interface.

Each sees what its original sees: ours the load reports that replicas send at a bounded rate, the
others the number of requests that they routed and that have not ended. Knows no simulated replica.
"""

import random
from collections.abc import Callable
from typing import Protocol

from service.channel.load import LoadView
from service.channel.messages import ReplicaLoad
from service.routing.policy import RouterSettings
from service.routing.replica_chooser import ReplicaChooser
from service.routing.token_ledger import TokenLedger
from workers.engine.protocol import GenerateRequest

PAGE_SIZE = 64
"""Tokens of a KV page of every replica."""

Clock = Callable[[], float]


class Policy(Protocol):
    """Replicas are named by their numbers as text."""

    def choose(self, request: GenerateRequest) -> str:
        """The replica that gets the request, which is sent there at once."""
        ...

    def on_load(self, replica_id: str, load: ReplicaLoad) -> None:
        """A report of the replica. seen_sequence: requests sent to it so far."""
        ...

    def on_first_output(self, replica_id: str, request_id: str) -> None: ...

    def on_end(self, replica_id: str, request_id: str) -> None: ...


class Tessera:
    """service.routing.router's decision, by its own chooser, settings and view of the loads."""

    def __init__(self, replica_ids: list[str], seed: int, clock: Clock) -> None:
        self._ledger = TokenLedger()
        self._chooser = ReplicaChooser(RouterSettings(), self._ledger, random.Random(seed))
        self._loads = {replica_id: LoadView(float("inf"), clock) for replica_id in replica_ids}
        self._num_sent = dict.fromkeys(replica_ids, 0)

    def choose(self, request: GenerateRequest) -> str:
        choice = self._chooser.choose(request, self._loads)
        replica_id = choice.decision.replica_id
        self._num_sent[replica_id] += 1
        num_tokens = len(request.prompt_token_ids)
        self._ledger.open(request.request_id, num_tokens)
        self._ledger.send(
            request.request_id,
            replica_id,
            num_tokens,
            choice.uncached_tokens,
            self._num_sent[replica_id],
        )
        self._chooser.on_sent(request.request_id, choice)
        return replica_id

    def on_load(self, replica_id: str, load: ReplicaLoad) -> None:
        self._loads[replica_id].update(load)
        self._ledger.on_report(replica_id, load.seen_sequence)

    def on_first_output(self, replica_id: str, request_id: str) -> None:
        self._ledger.start(request_id)

    def on_end(self, replica_id: str, request_id: str) -> None:
        self._ledger.close(request_id)
        self._chooser.on_end(request_id, self._loads[replica_id].written_tokens)


class RoundRobin:
    """One after the other."""

    def __init__(self, replica_ids: list[str], seed: int, clock: Clock) -> None:
        self._replica_ids = replica_ids
        self._num_routed = 0

    def choose(self, request: GenerateRequest) -> str:
        self._num_routed += 1
        return self._replica_ids[self._num_routed % len(self._replica_ids)]

    def on_load(self, replica_id: str, load: ReplicaLoad) -> None:
        pass

    def on_first_output(self, replica_id: str, request_id: str) -> None:
        pass

    def on_end(self, replica_id: str, request_id: str) -> None:
        pass


class PowerOfTwo:
    """Of two replicas at random, the one with fewer ongoing requests.

    As ray.serve._private.request_router.pow_2_router chooses, with counts that are exact and free
    (Serve caches them or asks).
    """

    def __init__(self, replica_ids: list[str], seed: int, clock: Clock) -> None:
        self._rng = random.Random(seed)
        self._num_ongoing = dict.fromkeys(replica_ids, 0)

    def choose(self, request: GenerateRequest) -> str:
        chosen = self._lighter(self._rng.sample(list(self._num_ongoing), 2))
        self._num_ongoing[chosen] += 1
        return chosen

    def on_load(self, replica_id: str, load: ReplicaLoad) -> None:
        pass

    def on_first_output(self, replica_id: str, request_id: str) -> None:
        pass

    def on_end(self, replica_id: str, request_id: str) -> None:
        self._num_ongoing[replica_id] -= 1

    def _lighter(self, replica_ids: list[str]) -> str:
        return min(replica_ids, key=self._num_ongoing.__getitem__)


class RayPrefix(PowerOfTwo):
    """The rule of Ray Serve LLM's PrefixCacheAffinityRouter, over Ray's own prefix tree.

    ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router of Ray 2.60: while the
    longest and the shortest queue differ by no more than imbalanced_threshold, the replicas that
    hold the longest matching prefix; if that is under match_rate_threshold of the prompt, those
    with the fewest characters in the tree; otherwise two at random. Of these the shortest queue
    wins. A token is one character here. The tree is called directly: Ray asks an actor.
    """

    match_rate_threshold = 0.1

    def __init__(
        self,
        replica_ids: list[str],
        seed: int,
        clock: Clock,
        imbalanced_threshold: float = float("inf"),
    ) -> None:
        from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_tree import PrefixTree

        super().__init__(replica_ids, seed, clock)
        self._clock = clock
        self._imbalanced_threshold = imbalanced_threshold
        self._tree = PrefixTree()
        self._tree.add_tenants(replica_ids, clock())

    def choose(self, request: GenerateRequest) -> str:
        text = "".join(map(chr, request.prompt_token_ids))
        candidates = self._best_matches(text) or self._rng.sample(list(self._num_ongoing), 2)
        chosen = self._lighter(candidates)
        self._num_ongoing[chosen] += 1
        self._tree.insert(text, chosen, self._clock())
        return chosen

    def _best_matches(self, text: str) -> list[str]:
        counts = self._num_ongoing.values()
        if max(counts) - min(counts) > self._imbalanced_threshold:
            return []
        matched_text, replica_ids = self._tree.prefix_match(text, list(self._num_ongoing))
        if len(matched_text) / len(text) < self.match_rate_threshold:
            replica_ids = self._tree.get_smallest_tenants()
        return list(replica_ids or [])


class RayPrefixBalanced(RayPrefix):
    """RayPrefix with the imbalanced_threshold of Ray's examples instead of none."""

    def __init__(self, replica_ids: list[str], seed: int, clock: Clock) -> None:
        super().__init__(replica_ids, seed, clock, imbalanced_threshold=10)
