"""Where sessions live: the replica that each one was last sent to, and a home for unknown ones.

Bounded: the least recently used sessions go first, and those that were silent too long. A home that
no table knows is the same in every process: rendezvous hashing (Thaler and Ravishankar 1998), so
that a replica that comes or goes moves only the sessions that win or lose it. Knows no loads.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable


class SessionTable:
    """max_sessions: remembered at most. idle_s: silence after which a session is forgotten."""

    def __init__(self, max_sessions: int, idle_s: float, clock: Callable[[], float]) -> None:
        self._max_sessions = max_sessions
        self._idle_s = idle_s
        self._clock = clock
        # Least recently used first: (replica, when).
        self._homes: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._homes)

    def find(self, key: bytes) -> str:
        """The replica of a session, "" if it is not known."""
        self._expire()
        return self._homes.get(key, ("", 0.0))[0]

    def settle(self, key: bytes, replica_id: str) -> None:
        """The session was sent to this replica."""
        self._homes[key] = (replica_id, self._clock())
        self._homes.move_to_end(key)
        self._expire()
        if len(self._homes) > self._max_sessions:
            self._homes.popitem(last=False)

    def _expire(self) -> None:
        oldest_s = self._clock() - self._idle_s
        while self._homes:
            key, (_, used_s) = next(iter(self._homes.items()))
            if used_s >= oldest_s:
                return
            del self._homes[key]


def rendezvous(key: bytes, replica_ids: Iterable[str]) -> str:
    """The replica whose name, hashed with the key, comes out highest; alike in every process.

    replica_ids must not be empty.
    """
    return max(replica_ids, key=lambda replica_id: _weight(key, replica_id))


def _weight(key: bytes, replica_id: str) -> bytes:
    return hashlib.blake2b(replica_id.encode(), digest_size=16, key=key).digest()
