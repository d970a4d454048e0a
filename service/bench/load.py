"""Load patterns: open loop (requests are due whatever the server does) and closed loop.

Sends through a callable and reads time through a Clock, both injected. Knows no transport.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from service.bench.trace import RequestFailedError, RequestTrace
from service.bench.workload import BenchRequest

PROBE_PERIOD_S = 0.01

Send = Callable[[BenchRequest, RequestTrace], Awaitable[None]]


class Clock(Protocol):
    """Seconds on a monotonic axis."""

    def now(self) -> float: ...

    async def sleep_until(self, due_s: float) -> None:
        """Return at due_s or later, and let other tasks run even if that is past."""
        ...


class MonotonicClock:
    """time.perf_counter and asyncio's timers, which are good to about a millisecond."""

    def now(self) -> float:
        return time.perf_counter()

    async def sleep_until(self, due_s: float) -> None:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        while (left_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(left_s)


@dataclass(frozen=True, slots=True)
class Extent:
    """When to stop sending; requests under way run to their end. None: without that limit."""

    num_requests: int | None
    duration_s: float | None = None
    timeout_s: float = 600.0


@dataclass(slots=True)
class LoadOutcome:
    """traces in the order of sending. loop_lags_s: lateness of a periodic timer of the client."""

    traces: list[RequestTrace] = field(default_factory=list)
    loop_lags_s: list[float] = field(default_factory=list)


class LoadGenerator:
    """Runs load patterns over one send function."""

    def __init__(self, send: Send, clock: Clock, extent: Extent) -> None:
        self._send = send
        self._clock = clock
        self._extent = extent

    async def open_loop(
        self, requests: Iterable[BenchRequest], arrivals: Iterable[float]
    ) -> LoadOutcome:
        """Send each request at its arrival, however many are under way."""
        outcome = LoadOutcome()
        async with self._probe(outcome), asyncio.TaskGroup() as group:
            start_s = self._clock.now()
            for request, offset_s in zip(self._limit(requests), arrivals, strict=False):
                if self._is_over(offset_s):
                    break
                await self._clock.sleep_until(start_s + offset_s)
                trace = RequestTrace(due_s=start_s + offset_s)
                outcome.traces.append(trace)
                group.create_task(self._run_one(request, trace))
        return outcome

    async def closed_loop(self, requests: Iterable[BenchRequest], concurrency: int) -> LoadOutcome:
        """Keep concurrency requests under way: each one's end sends the next."""
        outcome = LoadOutcome()
        source = self._limit(requests)
        async with self._probe(outcome), asyncio.TaskGroup() as group:
            start_s = self._clock.now()
            for _ in range(concurrency):
                group.create_task(self._keep_one_running(source, start_s, outcome.traces))
        return outcome

    async def _keep_one_running(
        self, source: Iterator[BenchRequest], start_s: float, traces: list[RequestTrace]
    ) -> None:
        while not self._is_over(self._clock.now() - start_s):
            request = next(source, None)
            if request is None:
                return
            trace = RequestTrace(due_s=self._clock.now())
            traces.append(trace)
            await self._run_one(request, trace)

    async def _run_one(self, request: BenchRequest, trace: RequestTrace) -> None:
        trace.started_s = self._clock.now()
        try:
            async with asyncio.timeout(self._extent.timeout_s):
                await self._send(request, trace)
        except TimeoutError:
            limit = f"no end within {self._extent.timeout_s:g} s"
            trace.fail(RequestFailedError("client_timeout", limit))
        except RequestFailedError as error:
            trace.fail(error)
        trace.ended_s = self._clock.now()

    def _limit(self, requests: Iterable[BenchRequest]) -> Iterator[BenchRequest]:
        return itertools.islice(requests, self._extent.num_requests)

    def _is_over(self, elapsed_s: float) -> bool:
        return self._extent.duration_s is not None and elapsed_s >= self._extent.duration_s

    @asynccontextmanager
    async def _probe(self, outcome: LoadOutcome) -> AsyncIterator[None]:
        task = asyncio.create_task(self._watch_lag(outcome.loop_lags_s))
        try:
            yield
        finally:
            task.cancel()

    async def _watch_lag(self, lags_s: list[float]) -> None:
        while True:
            due_s = self._clock.now() + PROBE_PERIOD_S
            await self._clock.sleep_until(due_s)
            lags_s.append(self._clock.now() - due_s)
