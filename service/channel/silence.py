"""How long the peer of a connection has said nothing. Knows no socket."""

MAX_LOOKS_AT_ONCE = 2


class Silence:
    """Counted from look to look, which are to come every look_interval_s.

    A look that comes late counts as MAX_LOOKS_AT_ONCE: this process stood still, or the machine
    did, and what the peer said meanwhile has not been read yet. Times are time.monotonic().
    """

    def __init__(self, look_interval_s: float, now_s: float) -> None:
        self._most_s = MAX_LOOKS_AT_ONCE * look_interval_s
        self._silent_s = 0.0
        self._since_s = now_s

    def on_heard(self, now_s: float) -> None:
        self._silent_s = 0.0
        self._since_s = now_s

    def look(self, now_s: float) -> float:
        """Seconds of silence as far as they count."""
        self._silent_s += min(now_s - self._since_s, self._most_s)
        self._since_s = now_s
        return self._silent_s
