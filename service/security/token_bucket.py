"""TokenBucket: a rate per minute that allows a minute's worth at once. Pure; the clock is given."""

from collections.abc import Callable

_MINUTE_S = 60.0


class TokenBucket:
    """Starts full. The level may fall below zero: a debt that the refill pays off first."""

    def __init__(self, per_minute: int, clock: Callable[[], float]) -> None:
        self._capacity = float(per_minute)
        self._per_s = per_minute / _MINUTE_S
        self._clock = clock
        self._level = self._capacity
        self._filled_s = clock()

    def wait_s(self, amount: float) -> float:
        """Seconds until `amount` can be taken, 0 if now. More than a minute's worth needs all."""
        missing = min(amount, self._capacity) - self._refill()
        return max(0.0, missing / self._per_s)

    def take(self, amount: float) -> None:
        """Take it whether it is there or not; whoever must not go into debt asks wait_s() first."""
        self._level = self._refill() - amount

    def put_back(self, amount: float) -> None:
        """Undo a take()."""
        self._level = min(self._capacity, self._refill() + amount)

    def _refill(self) -> float:
        now_s = self._clock()
        elapsed_s = max(0.0, now_s - self._filled_s)
        self._filled_s = now_s
        self._level = min(self._capacity, self._level + elapsed_s * self._per_s)
        return self._level
