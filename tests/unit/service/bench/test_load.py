"""Open and closed loops on virtual time: who is sent when, and when sending stops."""

import asyncio
import time
from itertools import count

import pytest

from service.bench.load import Extent, LoadGenerator, LoadOutcome, MonotonicClock
from service.bench.trace import RequestFailedError, RequestTrace
from service.bench.workload import BenchRequest
from tests.unit.service.bench.virtual_clock import VirtualClock

pytestmark = pytest.mark.asyncio


def requests():
    return (BenchRequest(index, [1], 1) for index in count())


class FixedServer:
    """Every request takes service_s, whatever else runs."""

    def __init__(self, clock: VirtualClock, service_s: float) -> None:
        self.clock = clock
        self.service_s = service_s
        self.num_running = 0
        self.max_running = 0
        self.indices: list[int] = []

    async def send(self, request: BenchRequest, trace: RequestTrace) -> None:
        self.indices.append(request.index)
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        await self.clock.sleep_until(self.clock.now() + self.service_s)
        self.num_running -= 1


async def run_closed(service_s: float, extent: Extent, concurrency: int):
    clock = VirtualClock()
    server = FixedServer(clock, service_s)
    generator = LoadGenerator(server.send, clock, extent)
    outcome: LoadOutcome = await clock.run(generator.closed_loop(requests(), concurrency))
    return server, outcome


async def run_open(service_s: float, extent: Extent, arrivals: list[float]):
    clock = VirtualClock()
    server = FixedServer(clock, service_s)
    generator = LoadGenerator(server.send, clock, extent)
    outcome: LoadOutcome = await clock.run(generator.open_loop(requests(), arrivals))
    return server, outcome


async def test_closed_loop_keeps_exactly_its_concurrency_under_way() -> None:
    server, outcome = await run_closed(1.0, Extent(10), concurrency=4)
    assert server.max_running == 4
    assert server.indices == list(range(10))
    starts = [trace.started_s - 100.0 for trace in outcome.traces]
    assert starts == pytest.approx([0, 0, 0, 0, 1, 1, 1, 1, 2, 2])


async def test_closed_loop_stops_sending_after_its_duration_and_waits_for_the_rest() -> None:
    server, outcome = await run_closed(1.0, Extent(None, duration_s=2.5), concurrency=2)
    assert len(outcome.traces) == 6
    assert server.num_running == 0
    assert max(trace.ended_s for trace in outcome.traces) == pytest.approx(103.0)


async def test_closed_loop_with_fewer_requests_than_concurrency_sends_them_all_once() -> None:
    server, _ = await run_closed(1.0, Extent(3), concurrency=8)
    assert server.indices == [0, 1, 2]


async def test_open_loop_sends_on_time_however_slow_the_server_is() -> None:
    server, outcome = await run_open(60.0, Extent(5), [0.0, 0.1, 0.5, 0.5, 2.0, 3.0])
    assert [t.started_s - 100.0 for t in outcome.traces] == pytest.approx([0, 0.1, 0.5, 0.5, 2.0])
    assert server.max_running == 5
    assert [t.ended_s - t.due_s for t in outcome.traces] == pytest.approx([60.0] * 5)


async def test_open_loop_sends_nothing_that_is_due_after_its_duration() -> None:
    _, outcome = await run_open(1.0, Extent(None, duration_s=0.5), [0.0, 0.2, 0.4, 0.6, 0.8])
    assert len(outcome.traces) == 3


async def test_failures_are_noted_and_the_run_goes_on() -> None:
    clock = VirtualClock()

    async def send(request: BenchRequest, trace: RequestTrace) -> None:
        if request.index % 2:
            raise RequestFailedError("overloaded", "try later")

    generator = LoadGenerator(send, clock, Extent(6))
    outcome = await clock.run(generator.closed_loop(requests(), 1))
    assert [trace.error_code for trace in outcome.traces] == [None, "overloaded"] * 3
    assert outcome.traces[1].error_message == "try later"


async def test_a_request_that_takes_too_long_ends_as_a_timeout() -> None:
    async def send(request: BenchRequest, trace: RequestTrace) -> None:
        await asyncio.Event().wait()

    generator = LoadGenerator(send, MonotonicClock(), Extent(2, timeout_s=0.02))
    outcome = await generator.closed_loop(requests(), 2)
    assert [trace.error_code for trace in outcome.traces] == ["client_timeout"] * 2


async def test_a_defect_of_the_client_is_not_taken_for_a_failed_request() -> None:
    async def send(request: BenchRequest, trace: RequestTrace) -> None:
        raise ZeroDivisionError

    generator = LoadGenerator(send, MonotonicClock(), Extent(2))
    with pytest.raises(ExceptionGroup) as caught:
        await generator.closed_loop(requests(), 1)
    assert caught.group_contains(ZeroDivisionError)


async def test_a_blocked_client_shows_in_both_lags() -> None:
    async def send(request: BenchRequest, trace: RequestTrace) -> None:
        if request.index == 0:
            time.sleep(0.05)
        await asyncio.sleep(0.02)

    generator = LoadGenerator(send, MonotonicClock(), Extent(3))
    outcome = await generator.open_loop(requests(), [0.0, 0.01, 0.015])
    assert outcome.traces[1].started_s - outcome.traces[1].due_s > 0.03
    assert max(outcome.loop_lags_s) > 0.03


async def test_the_real_clock_lets_others_run_even_when_it_is_late() -> None:
    clock = MonotonicClock()
    ran: list[str] = []

    async def other() -> None:
        ran.append("other")

    task = asyncio.create_task(other())
    await clock.sleep_until(clock.now() - 1.0)
    assert ran == ["other"]
    await task
    due_s = clock.now() + 0.01
    await clock.sleep_until(due_s)
    assert clock.now() >= due_s
