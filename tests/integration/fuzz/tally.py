"""What was answered, counted, and what should not have been. Thread-safe; knows no protocol."""

import threading
from collections import Counter

MAX_KEPT_FAILURES = 50


class Tally:
    """count(): one answer of a kind. fail(): one answer, or its absence, that is a bug."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._failures: list[str] = []
        self._notes: list[str] = []
        self._num_failures = 0

    def count(self, source: str, answer: str, times: int = 1) -> None:
        with self._lock:
            self._counts[source, answer] += times

    def fail(self, source: str, what: str) -> None:
        with self._lock:
            self._num_failures += 1
            if len(self._failures) < MAX_KEPT_FAILURES:
                self._failures.append(f"{source}: {what}")

    def note(self, what: str) -> None:
        """What a reader wants to know and nobody judges."""
        with self._lock:
            self._notes.append(what)

    @property
    def num_failures(self) -> int:
        return self._num_failures

    def counts(self, source: str) -> dict[str, int]:
        with self._lock:
            return {a: n for (s, a), n in sorted(self._counts.items()) if s == source}

    def report(self) -> str:
        """One line a source, then notes, then the failures."""
        sources = sorted({source for source, _ in self._counts})
        lines = []
        for source in sources:
            counts = self.counts(source)
            answers = ", ".join(f"{answer} {number}" for answer, number in counts.items())
            lines.append(f"{source}: {sum(counts.values())} ({answers})")
        lines += self._notes
        lines += [f"FAILED {failure}" for failure in self._failures]
        lines.append(f"{self._num_failures} failures")
        return "\n".join(lines)
