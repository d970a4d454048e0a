"""How long an event loop stood still, in CPU time of its process.

A task comes back to the loop again and again. What passes between two of its turns is counted as
the smaller of wall and CPU time, so that a machine that is busy with others does not count, and
what holds the interpreter lock on another thread does.
"""

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

MAX_UNITS = 2.0
"""No more than 20 ms of a quiet core: in units of cpu_unit_s()."""
# Each after a pause that is so much longer than the one before: what others do has changed by then.
_REPETITIONS = 20
_PAUSE_S = 0.05
T = TypeVar("T")


@dataclass(slots=True)
class LoopProbe:
    """longest_s: of the longest time without a turn."""

    longest_s: float = 0.0

    async def run(self) -> None:
        wall_s, cpu_s = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(0)
            now_s, cpu_now_s = time.perf_counter(), time.process_time()
            self.longest_s = max(self.longest_s, min(now_s - wall_s, cpu_now_s - cpu_s))
            wall_s, cpu_s = now_s, cpu_now_s


@asynccontextmanager
async def watching_the_loop() -> AsyncIterator[LoopProbe]:
    """What lives before, the test suite's own objects, is no work of the collector's any more."""
    gc.collect()
    gc.freeze()
    probe = LoopProbe()
    task = asyncio.create_task(probe.run())
    try:
        await asyncio.sleep(0)
        yield probe
    finally:
        # What came last has to be seen too: it may have been all there was.
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def cpu_unit_s() -> float:
    """What this machine takes now for a fixed piece of work that a quiet core does in 10 ms: by the
    quickest of three, each as long as what is judged. A shorter one would find a core to itself
    that others share."""

    def once() -> float:
        started_s = time.thread_time()
        sum(i * i for i in range(170_000))
        return time.thread_time() - started_s

    return min(once() for _ in range(3))


async def held_units(work: Callable[[], Awaitable[T]]) -> tuple[T, float]:
    """What the work gave, and how long it kept the loop at a time: in units of cpu_unit_s().

    Work that keeps it for too long is done again: others may have had the machine's caches. What
    counts is the shortest, which work that holds the loop by itself does not get below the limit.
    """
    shortest = float("inf")
    for repetition in range(_REPETITIONS):
        await asyncio.sleep(repetition * _PAUSE_S)
        async with watching_the_loop() as probe:
            result = await work()
        shortest = min(shortest, probe.longest_s / cpu_unit_s())
        if shortest < MAX_UNITS:
            break
    return result, shortest
