"""Stores as an ingress calls them: stops reach runners, and a store that is silent is named."""

import asyncio

import pytest
import ray

from service.deployments.response_store_actor import RemoteResponseStore
from service.errors import ApiError, ApiErrorCode
from service.response_store.records import (
    BegunResponse,
    EndedResponse,
    ResponseName,
    State,
    StoreLimits,
)
from service.response_store.runs import Runs
from service.response_store.store import LocalResponseStore

pytestmark = pytest.mark.asyncio

LIMITS = StoreLimits(8, 1 << 20, 1 << 16, 100.0)
NAME = ResponseName("t", "a")
BEGUN = BegunResponse(NAME, "m", b"{}", "r")
ENDED = EndedResponse(NAME, "m", b"{}", b"[]", b"[]")


@pytest.fixture
def store():
    return LocalResponseStore(LIMITS)


async def test_a_stop_reaches_its_runner_and_waits_for_the_end(store):
    await store.begin(BEGUN)
    asked = asyncio.create_task(store.cancellations("r", 60.0))
    await asyncio.sleep(0.01)
    stopped = asyncio.create_task(store.cancel(NAME, 60.0))
    assert await asyncio.wait_for(asked, 30) == [NAME]
    assert not stopped.done()
    await store.end(ENDED)
    assert (await asyncio.wait_for(stopped, 30)).state is State.ENDED


async def test_a_stop_that_nobody_hears_ends_in_time(store):
    await store.begin(BEGUN)
    stopped = await asyncio.wait_for(store.cancel(NAME, 0.05), 30)
    assert stopped.state is State.CANCELLING
    assert await store.cancellations("another", 0.01) == []


async def test_runs_follow_the_store(store):
    runs = Runs("r", store, LIMITS.max_response_bytes)
    following = asyncio.create_task(runs.follow())
    run = runs.add(NAME)
    await store.begin(BEGUN)
    waiting = asyncio.create_task(run.wait_for(asyncio.Event().wait))
    await asyncio.sleep(0.01)
    stopping = asyncio.create_task(store.cancel(NAME, 60.0))
    assert await asyncio.wait_for(waiting, 30) is None
    assert run.is_cancelled
    assert await run.wait_for(asyncio.Event().wait) is None
    await store.end(ENDED)
    await stopping
    following.cancel()


async def test_work_that_is_not_stopped_gives_its_result_or_its_own_timeout():
    runs = Runs("r", LocalResponseStore(LIMITS), LIMITS.max_response_bytes)
    run = runs.add(NAME)

    async def late():
        raise TimeoutError("its own")

    assert await run.wait_for(lambda: asyncio.sleep(0, "done")) == "done"
    with pytest.raises(TimeoutError, match="its own"):
        await run.wait_for(late)


class Method:
    def __init__(self, answer):
        self._answer = answer

    def remote(self, *args):
        return self._answer(*args)


class Actor:
    """Every method answers so."""

    def __init__(self, answer):
        self._answer = answer

    def __getattr__(self, name):
        return Method(self._answer)


async def lost(*args):
    raise ray.exceptions.RayActorError


async def silent(*args):
    await asyncio.Event().wait()


@pytest.mark.parametrize("answer", [lost, silent])
async def test_a_store_that_cannot_be_reached_is_a_typed_error_in_time(answer):
    store = RemoteResponseStore(Actor(answer), timeout_s=0.05)
    for call in (
        lambda: store.get(NAME),
        lambda: store.begin(BEGUN),
        lambda: store.end(ENDED),
        lambda: store.delete(NAME),
        lambda: store.cancel(NAME, 0.01),
        lambda: store.conversation(NAME, 100),
        lambda: store.cancellations("r", 0.01),
    ):
        async with asyncio.timeout(30):
            with pytest.raises(ApiError) as raised:
                await call()
        assert raised.value.code is ApiErrorCode.UNAVAILABLE
