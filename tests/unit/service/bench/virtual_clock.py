"""A clock that jumps to the next due time when every task waits: load patterns without waiting."""

import asyncio
import heapq
import itertools
from collections.abc import Coroutine
from typing import Any

# More turns of the event loop than any chain of ready callbacks in these tests takes.
SETTLE_TURNS = 20


class VirtualClock:
    """Time stands still while anything can run."""

    def __init__(self) -> None:
        self._now_s = 100.0
        self._order = itertools.count()
        self._waiting: list[tuple[float, int, asyncio.Future[None]]] = []

    def now(self) -> float:
        return self._now_s

    async def sleep_until(self, due_s: float) -> None:
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (due_s, next(self._order), future))
        await future

    async def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        """Run main to its end, moving time on whenever everything waits."""
        task = asyncio.ensure_future(main)
        while True:
            for _ in range(SETTLE_TURNS):
                await asyncio.sleep(0)
            if task.done():
                return await task
            due_s, _, future = heapq.heappop(self._waiting)
            self._now_s = max(self._now_s, due_s)
            if not future.done():
                future.set_result(None)
