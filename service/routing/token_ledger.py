"""Which requests this ingress has under way, and which of their tokens are not computed yet.

The one place that counts them: admission, the choice of a replica and metrics read it. Knows no
transport, no settings and no replica but by its name.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class ReplicaQueue:
    """What a replica has of this ingress's requests and may not have told of.

    uncached_tokens: of those that it has not begun to answer, without what is probably in its
    cache. unseen: by request, tokens and number of the Submit message, of those that the replica's
    last report cannot include yet; in the order of their numbers. unseen_tokens: of these.
    """

    uncached_tokens: int = 0
    unseen_tokens: int = 0
    unseen: dict[str, tuple[int, int]] = field(default_factory=dict)

    @property
    def num_unseen(self) -> int:
        return len(self.unseen)


@dataclass(slots=True)
class _Entry:
    """num_tokens: prompt and output so far. replica_id: "" while it waits in this ingress."""

    num_tokens: int
    is_queued: bool = True
    replica_id: str = ""
    uncached_tokens: int = 0


_NOTHING = ReplicaQueue()


class TokenLedger:
    """open() a request, then send(), start() and recall() it as often as it is moved; close().

    A request is queued until its replica begins to answer: in this ingress or at a replica.
    """

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._queues: dict[str, ReplicaQueue] = {}
        self._queued_tokens = 0

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._entries)

    @property
    def queued_tokens(self) -> int:
        """Tokens of the queued requests."""
        return self._queued_tokens

    def at(self, replica_id: str) -> ReplicaQueue:
        """Only to be read."""
        return self._queues.get(replica_id, _NOTHING)

    def open(self, request_id: str, num_tokens: int) -> None:
        """The request was admitted; no replica has it."""
        self._entries[request_id] = _Entry(num_tokens)
        self._queued_tokens += num_tokens

    def send(
        self, request_id: str, replica_id: str, num_tokens: int, uncached_tokens: int, sequence: int
    ) -> None:
        """The replica gets the request with the Submit message of that number.

        num_tokens: as it is now, prompt and output. It counts nowhere else any more.
        """
        self.recall(request_id, num_tokens)
        entry = self._entries[request_id]
        entry.replica_id, entry.uncached_tokens = replica_id, uncached_tokens
        queue = self._queues.setdefault(replica_id, ReplicaQueue())
        queue.uncached_tokens += uncached_tokens
        queue.unseen_tokens += num_tokens
        queue.unseen[request_id] = (num_tokens, sequence)

    def start(self, request_id: str) -> None:
        """The replica has begun to answer, or the request is over. Once more does no harm."""
        entry = self._entries[request_id]
        if entry.is_queued:
            entry.is_queued = False
            self._queued_tokens -= entry.num_tokens
            if entry.uncached_tokens:
                self._queues[entry.replica_id].uncached_tokens -= entry.uncached_tokens

    def recall(self, request_id: str, num_tokens: int) -> None:
        """No replica has the request: with num_tokens now, it is queued in this ingress."""
        self.close(request_id)
        self.open(request_id, num_tokens)

    def close(self, request_id: str) -> None:
        """The request has ended."""
        self.start(request_id)
        entry = self._entries.pop(request_id)
        queue = self._queues.get(entry.replica_id)
        if queue is None:
            return
        num_tokens, _ = queue.unseen.pop(request_id, (0, 0))
        queue.unseen_tokens -= num_tokens
        if queue == _NOTHING:
            del self._queues[entry.replica_id]

    def on_report(self, replica_id: str, seen_sequence: int) -> None:
        """The replica's report includes the Submit messages up to that number."""
        queue = self.at(replica_id)
        while queue.unseen:
            request_id, (num_tokens, sequence) = next(iter(queue.unseen.items()))
            if sequence > seen_sequence:
                return
            del queue.unseen[request_id]
            queue.unseen_tokens -= num_tokens
