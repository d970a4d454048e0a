"""A streamed response is known to the store before its client has its id."""

import asyncio
from dataclasses import replace

import pytest
import pytest_asyncio

from service.api.responses import keeping
from service.response_store.records import ResponseName, State, StoreLimits
from service.response_store.runs import Runs
from service.response_store.store import LocalResponseStore
from service.security.callers import ANONYMOUS
from tests.fakes.asgi_client import AsgiClient

pytestmark = pytest.mark.asyncio
LIMITS = StoreLimits(100, 1 << 20, 1 << 18, 100.0)


class BusyStore(LocalResponseStore):
    """Takes no response before it is let."""

    def __init__(self):
        super().__init__(LIMITS)
        self.asked: list[ResponseName] = []
        self.may_begin = asyncio.Event()

    async def begin(self, response):
        self.asked.append(response.name)
        await self.may_begin.wait()
        await super().begin(response)


@pytest.fixture
def store():
    return BusyStore()


@pytest.fixture
def services(services, store):
    return replace(services, responses=Runs("here", store, LIMITS.max_response_bytes))


@pytest_asyncio.fixture
async def streamed(app, bench, store):
    """A client whose stream the store has been told of, but has not begun."""
    bench.backend.gate = asyncio.Semaphore(3)
    client = AsgiClient(app, "/v1/responses", {"model": "tiny", "input": "x", "stream": True})
    running = asyncio.create_task(client.run())
    await until(lambda: store.asked)
    yield client
    client.left.set()
    store.may_begin.set()
    await asyncio.wait_for(running, 60)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


async def test_an_id_is_told_when_the_store_knows_it(streamed, store):
    for _ in range(100):
        await asyncio.sleep(0)
    assert streamed.events == []
    store.may_begin.set()
    await until(lambda: streamed.events)
    told = ResponseName(ANONYMOUS.tenant, streamed.events[0]["response"]["id"])
    assert store.asked == [told]
    assert (await store.get(told)).state is State.RUNNING


async def test_a_store_that_does_not_answer_holds_no_stream(app, store, monkeypatch):
    monkeypatch.setattr(keeping, "BEGIN_S", 0.05)
    client = AsgiClient(app, "/v1/responses", {"model": "tiny", "input": "x", "stream": True})
    running = asyncio.create_task(client.run())
    await until(lambda: any(one["type"] == "response.output_text.delta" for one in client.events))
    assert not store.may_begin.is_set()
    store.may_begin.set()
    await asyncio.wait_for(running, 60)
    assert client.events[-1]["response"]["store"]


async def test_who_leaves_before_has_it_stopped(streamed, store, bench):
    streamed.left.set()
    await until(lambda: bench.backend.streams[0].is_aborted)
    store.may_begin.set()

    async def is_over():
        found = await store.get(store.asked[0])
        return found is not None and found.state is State.ENDED

    async with asyncio.timeout(60):
        while not await is_over():
            await asyncio.sleep(0.005)
    assert b'"status":"cancelled"' in (await store.get(store.asked[0])).head
