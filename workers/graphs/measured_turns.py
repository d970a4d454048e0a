"""Which replays of which graph sizes are measured: every Nth of a size.

Depends on what was replayed only, so that all ranks of a group decide alike. Knows no graph.
"""

from collections import Counter
from collections.abc import Iterable


class MeasuredTurns:
    """Counts the replays of each size. interval_steps 0: none is ever measured."""

    def __init__(self, interval_steps: int) -> None:
        self.interval_steps = interval_steps
        self._replays: Counter[int] = Counter()

    def take(self, size: int) -> bool:
        """Count one replay of size; whether it is one to be measured."""
        if not self.interval_steps:
            return False
        self._replays[size] += 1
        return self._replays[size] % self.interval_steps == 0

    def most_replayed(self, sizes: Iterable[int]) -> int | None:
        """The one of sizes that was replayed most, if any came to a turn of its own yet."""
        due = [size for size in sizes if self._replays[size] >= max(1, self.interval_steps)]
        return max(due, key=lambda size: (self._replays[size], size), default=None)
