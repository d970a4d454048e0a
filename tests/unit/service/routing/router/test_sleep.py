"""A model that sleeps: what operators are told, and what requests are."""

import asyncio

import pytest

from service.errors import ApiError, ApiErrorCode
from service.routing.sleep import SleepControl
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import FakeReplica, eventually
from tests.unit.service.routing.router.test_moved_streams import (
    EXPECTED,
    begun,
    is_clean,
    kept,
    read_to_error,
)
from tests.unit.service.routing.router.test_router import anyone, collect, request, routed, tokens
from workers.engine.protocol import FinishReason

pytestmark = pytest.mark.asyncio


def control_of(r):
    return SleepControl("fake", lambda: r.router.links)


async def refusal(r):
    with pytest.raises(ApiError) as caught:
        await r.router.submit(request(), anyone())
    return caught.value


async def test_a_sleeping_model_refuses_until_it_is_awake_and_stays_ready():
    with FakeReplica() as replica:
        async with routed(replica) as r:
            control = control_of(r)
            assert not control.is_sleeping
            await control.sleep(2, aborts=True)
            assert control.is_sleeping
            assert replica.engine.sleep_level == 2
            assert r.router.is_ready
            error = await refusal(r)
            assert (error.code, error.retry_after_s) == (ApiErrorCode.MODEL_SLEEPING, 10.0)
            with pytest.raises(ApiError, match="sleeps"):
                r.router.check_admission()
            await control.wake_up()
            assert not control.is_sleeping
            outputs = await collect(await r.router.submit(request(), anyone()))
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert is_clean(r)


async def test_requests_that_run_are_ended_with_what_they_have_or_end_before_sleep():
    with kept("a") as a:
        async with routed(a) as r:
            control = control_of(r)
            stream, received = await begun(r)
            await control.sleep(1, aborts=True)
            more, error = await read_to_error(stream)
            received += more
            assert received == EXPECTED[: len(received)]
            assert error.code is ApiErrorCode.MODEL_SLEEPING
            await control.wake_up()
            stream, received = await begun(r, "again")
            sleeping = asyncio.create_task(control.sleep(1, aborts=False))
            assert received + tokens(await collect(stream)) == EXPECTED
            await sleeping
            assert control.is_sleeping
            assert is_clean(r)


async def test_another_replica_that_is_awake_goes_on():
    with kept("a") as a, kept("b") as b:
        async with routed(a) as r:
            control = control_of(r)
            stream, received = await begun(r)
            await r.router.update_replicas([a.address, b.address])
            await eventually(lambda: r.router.num_connected_replicas == 2)
            only_a = SleepControl("fake", lambda: {"a": r.router.links["a"]})
            await only_a.sleep(1, aborts=True)
            assert received + tokens(await collect(stream)) == EXPECTED
            assert r.metrics.reasons["sleep"] == 1
            assert not control.is_sleeping


async def test_who_cannot_sleep_is_left_alone_and_says_why():
    with FakeReplica(FakeEngine(sleep_obstacle="it has insomnia")) as replica:
        async with routed(replica) as r:
            with pytest.raises(ApiError, match="cannot sleep: it has insomnia") as caught:
                await control_of(r).sleep(1, aborts=True)
            assert caught.value.code is ApiErrorCode.INVALID_REQUEST
            assert await collect(await r.router.submit(request(), anyone()))
    with pytest.raises(ApiError, match="no replica now"):
        bool(SleepControl("fake", dict).is_sleeping)


async def test_a_later_call_takes_the_place_of_one_that_waits():
    with kept("a") as a:
        async with routed(a) as r:
            control = control_of(r)
            stream, received = await begun(r, max_tokens=4000)
            sleeping = asyncio.create_task(control.sleep(1, aborts=False))
            await eventually(lambda: control._num_orders == 1)
            await control.wake_up()
            with pytest.raises(ApiError, match="later call"):
                await sleeping
            await stream.aclose()
            assert received
            await eventually(lambda: not control.is_sleeping)


async def test_a_replica_that_is_lost_meanwhile_is_told():
    with kept("a") as a:
        async with routed(a) as r:
            control = control_of(r)
            stream, _ = await begun(r, max_tokens=4000)
            sleeping = asyncio.create_task(control.sleep(1, aborts=False))
            await eventually(lambda: control._num_orders == 1)
            await asyncio.to_thread(a.kill)
            with pytest.raises(ApiError, match="was lost"):
                await sleeping
            await stream.aclose()
