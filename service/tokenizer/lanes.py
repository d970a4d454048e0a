"""Which worker takes which job: one is kept for short jobs, the others prefer long ones.

So a text of megabytes holds up texts of its own size only. Within a lane callers take turns. Knows
no process and no job. Use from one event loop.
"""

import asyncio
from dataclasses import dataclass
from typing import Generic, TypeVar

from service.tokenizer.fair_queue import FairQueue, Flow

W = TypeVar("W")


@dataclass(frozen=True, slots=True)
class Work:
    """cost: bytes to be gone through."""

    flow: Flow
    cost: int


class Lanes(Generic[W]):
    """Workers without a job, and jobs without a worker; never both of one lane."""

    def __init__(self, max_short_cost: int) -> None:
        self._max_short_cost = max_short_cost
        self._short: FairQueue[asyncio.Future[W]] = FairQueue()
        self._long: FairQueue[asyncio.Future[W]] = FairQueue()
        self._idle: list[W] = []
        self._idle_for_short: list[W] = []
        self._kept_for_short: set[int] = set()

    def add(self, worker: W, *, is_for_short: bool) -> None:
        """A worker that came up. is_for_short: it takes short jobs only."""
        if is_for_short:
            self._kept_for_short.add(id(worker))
        self.give_back(worker)

    def remove(self, worker: W) -> bool:
        """A worker that was taken and is gone. Returns whether it was kept for short jobs."""
        is_for_short = id(worker) in self._kept_for_short
        self._kept_for_short.discard(id(worker))
        return is_for_short

    def give_back(self, worker: W) -> None:
        """A worker that was taken is free again."""
        is_for_short = id(worker) in self._kept_for_short
        queues = (self._short,) if is_for_short else (self._long, self._short)
        for queue in queues:
            while queue:
                waiter = queue.pop()
                if not waiter.done():
                    waiter.set_result(worker)
                    return
        (self._idle_for_short if is_for_short else self._idle).append(worker)

    async def take(self, work: Work) -> W:
        """A worker for the job, at its turn. Whoever takes one gives it back or removes it."""
        is_short = work.cost <= self._max_short_cost
        for idle in (self._idle_for_short, self._idle) if is_short else (self._idle,):
            if idle:
                return idle.pop()
        waiter: asyncio.Future[W] = asyncio.get_running_loop().create_future()
        queue = self._short if is_short else self._long
        queue.push(work.flow, work.cost, waiter)
        try:
            return await waiter
        except asyncio.CancelledError:
            # The turn may have come in the very moment in which the caller left.
            if waiter.done() and not waiter.cancelled():
                self.give_back(waiter.result())
            else:
                queue.remove(work.flow, waiter)
            raise

    def clear(self) -> list[W]:
        """Every worker without a job, which are no longer ours."""
        idle, self._idle, self._idle_for_short = [*self._idle, *self._idle_for_short], [], []
        return idle
