"""Stop strings in a stream of text: found across chunk borders, never shown in part.

Aho and Corasick's automaton (Efficient string matching, CACM 1975): its depth after a character is
the length of the longest suffix that may still become a stop string, which is exactly what has to
be held back. The result depends on the text alone, not on how it was cut into chunks.
"""

from collections import deque
from dataclasses import dataclass, field

ROOT = 0


@dataclass(slots=True)
class _Node:
    """depth: length of the text the node stands for. match: index of the stop string ending here,
    the longest if there are several, or None."""

    depth: int
    children: dict[str, int] = field(default_factory=dict)
    fallback: int = ROOT
    match: int | None = None


@dataclass(frozen=True, slots=True)
class StopScan:
    """text: what may be shown now. stop: the stop string that ended the text, if one did."""

    text: str
    stop: str | None = None


class StopStrings:
    """The automaton of one request, shared by its choices. stops must not be empty strings."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self.stops = stops
        self._nodes = [_Node(depth=0)]
        for index, stop in enumerate(stops):
            self._insert(stop, index)
        self._link()

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        nodes = self._nodes
        while True:
            child = nodes[state].children.get(char)
            if child is not None:
                return child
            if state == ROOT:
                return ROOT
            state = nodes[state].fallback

    def depth(self, state: int) -> int:
        return self._nodes[state].depth

    def match(self, state: int) -> str | None:
        """The longest stop string that ends in this state."""
        index = self._nodes[state].match
        return None if index is None else self.stops[index]

    def _insert(self, stop: str, index: int) -> None:
        state = ROOT
        for char in stop:
            child = self._nodes[state].children.get(char)
            if child is None:
                child = len(self._nodes)
                self._nodes.append(_Node(depth=self._nodes[state].depth + 1))
                self._nodes[state].children[char] = child
            state = child
        self._nodes[state].match = index

    def _link(self) -> None:
        queue = deque(self._nodes[ROOT].children.values())
        while queue:
            parent = queue.popleft()
            for char, child in self._nodes[parent].children.items():
                fallback = self.step(self._nodes[parent].fallback, char)
                node = self._nodes[child]
                node.fallback = fallback
                if node.match is None:
                    node.match = self._nodes[fallback].match
                queue.append(child)


class StopScanner:
    """Scans the text of one choice. After a stop was found nothing more may be pushed."""

    def __init__(self, automaton: StopStrings, *, include_stop: bool) -> None:
        self._automaton = automaton
        self._include_stop = include_stop
        self._state = ROOT
        self._held = ""

    def push(self, text: str) -> StopScan:
        """Text that is certain to come before any stop string; the stop string itself on a hit."""
        automaton, state = self._automaton, self._state
        buffer = self._held + text
        start = len(self._held)
        for position in range(start, len(buffer)):
            state = automaton.step(state, buffer[position])
            stop = automaton.match(state)
            if stop is not None:
                end = position + 1
                self._held = ""
                return StopScan(buffer[: end if self._include_stop else end - len(stop)], stop)
        self._state = state
        cut = len(buffer) - automaton.depth(state)
        self._held = buffer[cut:]
        return StopScan(buffer[:cut])

    def flush(self) -> str:
        """What was held back, once the text is over without a stop string."""
        held, self._held = self._held, ""
        return held
