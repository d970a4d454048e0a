"""Which replays of which graphs are measured: every Nth of a graph.

Depends on what was replayed only, so that all ranks of a group decide alike. Knows no graph.
"""

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class MeasuredTurns(Generic[Key]):
    """Counts the replays of each graph, by its key. interval_steps 0: none is ever measured."""

    def __init__(self, interval_steps: int) -> None:
        self.interval_steps = interval_steps
        self._replays: Counter[Key] = Counter()

    def take(self, key: Key) -> bool:
        """Count one replay of key; whether it is one to be measured."""
        if not self.interval_steps:
            return False
        self._replays[key] += 1
        return self._replays[key] % self.interval_steps == 0

    def most_replayed(self, keys: Iterable[Key]) -> Key | None:
        """The one of keys that was replayed most, of several the last, if any came to a turn of its
        own yet."""
        due = [key for key in keys if self._replays[key] >= max(1, self.interval_steps)]
        return max(reversed(due), key=self._replays.__getitem__, default=None)
