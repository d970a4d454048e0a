"""A request for a model without replicas: it waits, bounded, and leaves nothing behind."""

import asyncio
import contextlib

import pytest

from service.autoscaling import demand
from service.autoscaling.demand import report_demand
from service.autoscaling.load import ModelAvailability
from service.autoscaling.settings import WaitingSettings
from service.errors import ApiError, ApiErrorCode
from service.routing.policy import RouterSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import FakeReplica, eventually
from tests.unit.service.routing.router.test_router import anyone, collect, request, routed, tokens

pytestmark = pytest.mark.asyncio

INFO = FakeEngine().info


def available(can_wake=True, has_failed=False, model=INFO):
    return ModelAvailability("Engine builtin", model, can_wake, has_failed)


@contextlib.asynccontextmanager
async def scaled_to_zero(**waiting):
    settings = RouterSettings(scale_up=WaitingSettings(**waiting))
    async with routed(settings=settings) as r:
        r.router.update_availability(available())
        yield r


async def submitted(r, count, prompt=(5,)):
    """Tasks that wait, once all of them do."""
    before = r.router.num_waiting_requests
    tasks = [
        asyncio.create_task(r.router.submit(request(f"r{before + i}", prompt), anyone()))
        for i in range(count)
    ]
    await eventually(lambda: r.router.num_waiting_requests == before + count)
    return tasks


def is_clean(r):
    held = r.admission.num_live_requests, r.admission.queued_tokens
    return held == (0, 0) and r.router.num_waiting_requests == r.router.num_waiting_tokens == 0


async def error_of(task):
    with pytest.raises(ApiError) as caught:
        await task
    return caught.value


async def test_a_request_waits_for_the_first_replica_and_succeeds():
    async with scaled_to_zero() as r:
        assert r.router.is_ready
        assert r.router.info == INFO
        r.router.check_admission()
        tasks = await submitted(r, 3, prompt=(5, 6))
        assert r.router.num_waiting_tokens == 6
        assert r.router.demand_changed.is_set()
        with FakeReplica() as replica:
            await r.router.update_replicas([replica.address])
            outputs = [await collect(await task) for task in tasks]
        assert all(tokens(output) == list(range(7, 15)) for output in outputs)
        assert len(r.metrics.scale_up_waits_s) == 3
        assert is_clean(r)


async def test_the_time_is_bounded_and_its_end_a_typed_error():
    async with scaled_to_zero(wait_s=0.05, retry_after_s=7.0) as r:
        error = await error_of(r.router.submit(request(), anyone()))
        assert error.code is ApiErrorCode.UNAVAILABLE
        assert error.retry_after_s == 7.0
        assert is_clean(r)


async def test_the_number_of_those_who_wait_is_bounded():
    async with scaled_to_zero(max_requests=2) as r:
        tasks = await submitted(r, 2)
        with pytest.raises(ApiError) as caught:
            r.router.check_admission()
        assert caught.value.code is ApiErrorCode.OVERLOADED
        assert (await error_of(r.router.submit(request("one-more"), anyone()))).retry_after_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        r.router.check_admission()
        assert is_clean(r)


async def test_their_tokens_are_bounded_but_an_empty_room_takes_any_prompt():
    async with scaled_to_zero(max_tokens=10) as r:
        (task,) = await submitted(r, 1, prompt=[5] * 50)
        error = await error_of(r.router.submit(request("one-more"), anyone()))
        assert error.code is ApiErrorCode.OVERLOADED
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert is_clean(r)


async def test_whoever_leaves_while_waiting_leaves_no_trace():
    async with scaled_to_zero() as r:
        leaving, staying = await submitted(r, 2)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert r.admission.num_live_requests == r.router.num_waiting_requests == 1
        with FakeReplica() as replica:
            await r.router.update_replicas([replica.address])
            await collect(await staying)
            assert replica.engine.num_finished == 1
        assert is_clean(r)


async def test_a_failed_start_ends_the_wait_and_the_readiness():
    async with scaled_to_zero() as r:
        (task,) = await submitted(r, 1)
        r.router.update_availability(available(has_failed=True))
        assert (await error_of(task)).code is ApiErrorCode.UNAVAILABLE
        assert not r.router.is_ready
        assert (
            await error_of(r.router.submit(request(), anyone()))
        ).code is ApiErrorCode.UNAVAILABLE
        r.router.update_availability(available())
        assert r.router.is_ready
        assert is_clean(r)


@pytest.mark.parametrize("told", [None, available(can_wake=False), available(model=None)])
async def test_where_nobody_would_start_a_replica_nobody_waits(told):
    async with routed() as r:
        r.router.update_availability(told)
        assert not r.router.is_ready
        assert (
            await error_of(r.router.submit(request(), anyone()))
        ).code is ApiErrorCode.UNAVAILABLE
        assert is_clean(r)


async def test_closing_the_router_ends_the_wait():
    async with scaled_to_zero() as r:
        (task,) = await submitted(r, 1)
        await r.router.aclose()
        assert (await error_of(task)).code is ApiErrorCode.UNAVAILABLE
        assert is_clean(r)


async def test_what_crosses_the_drain_of_the_last_replica_waits_for_the_next():
    with FakeReplica(replica_id="a") as old, FakeReplica(replica_id="b") as new:
        async with scaled_to_zero() as r:
            await r.router.update_replicas([old.address])
            await eventually(lambda: r.router.num_connected_replicas == 1)
            old.server.drain()
            stream = await r.router.submit(request(), anyone())  # the drain is not known here yet
            await eventually(lambda: r.router.num_waiting_requests == 1)
            assert r.router.demand_changed.is_set()
            await r.router.update_replicas([new.address])
            assert len(tokens(await collect(stream))) == 8
            assert is_clean(r)


async def test_more_than_the_first_replica_takes_wait_on_for_room():
    settings = RouterSettings(max_waiting_requests=1)
    async with routed(settings=settings) as r:
        r.router.update_availability(available())
        tasks = await submitted(r, 6)
        with FakeReplica(FakeEngine(step_s=0.002, max_running=1)) as replica:
            await r.router.update_replicas([replica.address])
            outputs = await asyncio.gather(*(read(task) for task in tasks))
        assert all(len(tokens(output)) == 8 for output in outputs)
        assert is_clean(r)


async def read(task):
    return await collect(await task)


@pytest.mark.parametrize(("interval_s", "is_changed"), [(3600.0, True), (0.05, False)])
async def test_demand_is_told_at_once_and_again_and_again(monkeypatch, interval_s, is_changed):
    """A change long before the interval ends, and what has not changed after it."""
    monkeypatch.setattr(demand, "REPORT_INTERVAL_S", interval_s)
    told = asyncio.Queue()
    async with scaled_to_zero() as r, asyncio.timeout(60):
        r.router.demand_changed.clear()
        reporter = asyncio.create_task(report_demand("key", "in-1", r.router, told.put))
        pending = [reporter]
        assert (await told.get()).num_requests == 0
        if is_changed:
            pending += await submitted(r, 1, prompt=(1, 2, 3))
            report = await told.get()
            assert (report.num_requests, report.num_tokens, report.model) == (1, 3, INFO)
        else:
            assert [(await told.get()).num_requests for _ in range(3)] == [0, 0, 0]
        for one in pending:
            one.cancel()
        await asyncio.gather(*pending, return_exceptions=True)


async def test_waiting_for_a_replica_is_no_overhead_of_the_way_to_it():
    tried = [await wait_and_overhead(0.6) for _ in range(3)]
    assert min(waited_s for waited_s, _ in tried) > 0.5
    assert min(overhead_s for _, overhead_s in tried) < 0.4


async def wait_and_overhead(wait_s):
    """Tried more than once: what a busy machine adds is not the same every time."""
    async with scaled_to_zero() as r:
        (task,) = await submitted(r, 1)
        await asyncio.sleep(wait_s)
        with FakeReplica(FakeEngine(step_s=0.001)) as replica:
            await r.router.update_replicas([replica.address])
            await collect(await task)
        (waited_s,) = r.metrics.scale_up_waits_s
        (overhead_s,) = r.metrics.overhead_s
    return waited_s, overhead_s
