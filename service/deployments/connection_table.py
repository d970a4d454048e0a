"""The connections of one HTTP server: how many there may be, and which gives way to a new one.

Knows neither sockets nor HTTP. One event loop.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Protocol


class Guest(Protocol):
    """A connection, or one whose handshake is under way. Hashed by identity."""

    def cut(self) -> None:
        """Close without an answer. Called at most once, and the table has let go of it by then."""


class ConnectionTable:
    """A guest is new until its first request is whole, then busy and idle in turn.

    Whoever fills the table with connections that ask for nothing pushes only those out: new guests
    give way first, the oldest of them first, then idle ones, the one idle for longest first. A
    busy one never does. cuts: connections that were refused or cut off, by reason.
    """

    def __init__(self, max_connections: int) -> None:
        self._max_connections = max_connections
        # Dicts for their order.
        self._new: dict[Guest, None] = {}
        self._idle: dict[Guest, None] = {}
        self._busy: dict[Guest, None] = {}
        self.cuts: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._new) + len(self._idle) + len(self._busy)

    def __iter__(self) -> Iterator[Guest]:
        """A copy: guests may leave meanwhile."""
        return iter((*self._new, *self._idle, *self._busy))

    def make_room(self) -> bool:
        """Whether one more may come, after cutting another one if need be."""
        if len(self) < self._max_connections:
            return True
        guest = next(iter(self._new), None) or next(iter(self._idle), None)
        if guest is None:
            return False
        self.leave(guest)
        self.cuts["gave way to a new connection"] += 1
        guest.cut()
        return True

    def enter(self, guest: Guest) -> None:
        self._new[guest] = None

    def become_busy(self, guest: Guest) -> None:
        """A request has come, its body included. No effect on a guest that has left."""
        if guest in self._new or guest in self._idle:
            self.leave(guest)
            self._busy[guest] = None

    def become_idle(self, guest: Guest) -> None:
        """All requests are answered. No effect on a guest that has left."""
        if guest in self._busy or guest in self._new:
            self.leave(guest)
            self._idle[guest] = None

    def leave(self, guest: Guest) -> None:
        """Harmless if it has left."""
        for group in (self._new, self._idle, self._busy):
            group.pop(guest, None)
