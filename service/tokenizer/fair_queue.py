"""Whose job is next: callers share in what their jobs cost, and so do the requests of each.

Start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996) in two levels. Within a request jobs keep
their order. Knows no clock: time is what has been handed out. Not safe for threads.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

T = TypeVar("T")


class Flow(NamedTuple):
    """Who a job is for. request: unique among the requests that are live."""

    caller: str
    request: str


class _Jobs(Protocol[T]):
    """Jobs below one member of a level. path: names of the levels that are left."""

    def __len__(self) -> int: ...

    def push(self, path: tuple[str, ...], cost: float, item: T) -> None: ...

    def pop(self) -> tuple[float, T]: ...

    def remove(self, path: tuple[str, ...], item: T) -> None:
        """Harmless if it is not there."""


class _Fifo(Generic[T]):
    """First come, first served."""

    def __init__(self) -> None:
        self._jobs: deque[tuple[float, T]] = deque()

    def __len__(self) -> int:
        return len(self._jobs)

    def push(self, path: tuple[str, ...], cost: float, item: T) -> None:
        self._jobs.append((cost, item))

    def pop(self) -> tuple[float, T]:
        return self._jobs.popleft()

    def remove(self, path: tuple[str, ...], item: T) -> None:
        self._jobs = deque(job for job in self._jobs if job[1] is not item)


@dataclass(slots=True)
class _Member(Generic[T]):
    """start: when its next job would begin if every member had its share of the time."""

    name: str
    start: float
    jobs: _Jobs[T]


class _Level(Generic[T]):
    """Members that share alike."""

    def __init__(self, make_jobs: Callable[[], _Jobs[T]]) -> None:
        self._make_jobs = make_jobs
        self._now = 0.0
        self._waiting: dict[str, _Member[T]] = {}
        # Where those without jobs ended: who comes back at once does not begin anew.
        self._ended: dict[str, float] = {}
        self._heap: list[tuple[float, int, _Member[T]]] = []
        self._order = itertools.count()

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, path: tuple[str, ...], cost: float, item: T) -> None:
        name, *rest = path
        member = self._waiting.get(name)
        if member is None:
            start = max(self._now, self._ended.pop(name, 0.0))
            member = self._waiting[name] = _Member(name, start, self._make_jobs())
            heapq.heappush(self._heap, (start, next(self._order), member))
        member.jobs.push(tuple(rest), cost, item)

    def pop(self) -> tuple[float, T]:
        """Raises IndexError when empty."""
        self._now, _, member = heapq.heappop(self._heap)
        cost, item = member.jobs.pop()
        member.start = self._now + cost
        if len(member.jobs):
            heapq.heappush(self._heap, (member.start, next(self._order), member))
        else:
            del self._waiting[member.name]
            self._ended = {k: v for k, v in self._ended.items() if v > self._now}
            self._ended[member.name] = member.start
        return cost, item

    def remove(self, path: tuple[str, ...], item: T) -> None:
        """Whoever has no other job keeps the account of those that were handed out."""
        name, *rest = path
        member = self._waiting.get(name)
        if member is None:
            return
        member.jobs.remove(tuple(rest), item)
        if not len(member.jobs):
            del self._waiting[name]
            self._heap = [entry for entry in self._heap if entry[2] is not member]
            heapq.heapify(self._heap)
            if member.start > self._now:
                self._ended[name] = member.start


class FairQueue(Generic[T]):
    """Jobs that wait for their turn."""

    def __init__(self) -> None:
        self._callers: _Level[T] = _Level(lambda: _Level(_Fifo))

    def __bool__(self) -> bool:
        return bool(len(self._callers))

    def push(self, flow: Flow, cost: float, item: T) -> None:
        """cost: in any unit that is the same for all; at least 1, so that jobs take turns."""
        self._callers.push(flow, max(cost, 1.0), item)

    def pop(self) -> T:
        """Raises IndexError when empty."""
        return self._callers.pop()[1]

    def remove(self, flow: Flow, item: T) -> None:
        """Nobody wants the very job any more: it costs nothing. Harmless if it is not there."""
        self._callers.remove(flow, item)
