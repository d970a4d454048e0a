"""Whether a peer takes what is written to it. Knows bytes, no socket."""

_MAX_IDLE_LOOKS = 2
"""The first look after our own standing still finds that nothing could be sent meanwhile."""


class Unread:
    """Of one connection. max_bytes: what may lie unread with a peer that takes nothing.

    Much may be written at once, as what waited for a replica, or what another one has lost: a peer
    that takes it has nothing wrong, however long it is.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_written = 0
        self._num_taken = 0
        self._num_idle_looks = 0

    def add(self, num_bytes: int) -> None:
        """They have been written."""
        self._num_written += num_bytes

    def look(self, num_unread: int) -> bool:
        """Whether the peer is to be left. num_unread: bytes that are still here. Called from time
        to time."""
        num_taken = self._num_written - num_unread
        is_idle = num_unread > self._max_bytes and num_taken == self._num_taken
        self._num_taken = num_taken
        self._num_idle_looks = self._num_idle_looks + 1 if is_idle else 0
        return self._num_idle_looks >= _MAX_IDLE_LOOKS
