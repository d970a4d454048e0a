"""A replica that drains hands its streams over, a few at a time, and none of them notices."""

import asyncio
import contextlib
import itertools

import pytest

from service.channel.load import LoadView
from service.channel.messages import ReplicaLoad
from service.errors import ApiError
from service.routing.policy import RouterSettings
from tests.fakes.replica import eventually
from tests.unit.service.routing.router.test_moved_streams import begun, is_clean, kept
from tests.unit.service.routing.router.test_router import anyone, collect, request, routed, tokens
from workers.engine.protocol import EngineStats

pytestmark = pytest.mark.asyncio

LONG = 4000


def expected(num_tokens):
    return [(6 + i) % 4096 for i in range(num_tokens)]


def takes_requests(r):
    with contextlib.suppress(ApiError):
        r.router.check_admission()
        return True
    return False


@contextlib.asynccontextmanager
async def two_replicas(leaving, staying, **settings):
    """The first one has what was submitted before the second one is linked."""
    async with routed(leaving, settings=RouterSettings(**settings)) as r:

        async def link_second():
            await r.router.update_replicas([leaving.address, staying.address])
            await eventually(lambda: r.router.num_connected_replicas == 2)

        yield r, link_second


async def test_a_draining_replica_is_empty_long_before_its_longest_stream_would_end():
    with kept("a") as a, kept("b") as b:
        async with two_replicas(a, b) as (r, link_second):
            started = [await begun(r, f"r{i}", 1000) for i in range(20)]
            await link_second()
            await asyncio.to_thread(a.server.drain)
            await eventually(lambda: not a.engine.running)
            assert a.engine.num_output_tokens < 20 * 1000
            assert a.server.num_live_requests == 0
            for stream, received in started:
                assert received + tokens(await collect(stream)) == expected(1000)
            assert r.metrics.reasons == {"only": 20, "drain": 20}
            assert len(r.metrics.pauses_s) == 20
            for sent in b.engine.requests:
                done = sent.resumed_token_ids
                assert done == expected(len(done))
            assert is_clean(r)


async def test_only_so_many_are_on_their_way_at_a_time():
    with kept("a") as a, kept("b", max_running=0) as b:
        async with two_replicas(a, b, max_handovers=3) as (r, link_second):
            started = [await begun(r, f"r{i}", LONG) for i in range(10)]
            await link_second()
            await asyncio.to_thread(a.server.drain)
            await eventually(lambda: len(b.engine.waiting) == 3)
            await asyncio.sleep(0.1)
            assert (len(b.engine.waiting), len(a.engine.running)) == (3, 7)
            b.engine.max_running = 100
            await eventually(lambda: not a.engine.running)
            for stream, _ in started:
                await stream.aclose()
            assert is_clean(r)


async def test_one_that_ends_on_its_way_makes_room_for_the_next():
    with kept("a") as a, kept("b", max_running=0) as b:
        async with two_replicas(a, b, max_handovers=1) as (r, link_second):
            started = [await begun(r, f"r{i}", LONG) for i in range(3)]
            await link_second()
            await asyncio.to_thread(a.server.drain)
            await eventually(lambda: len(b.engine.requests) == 1)
            by_id = {stream.id: stream for stream, _ in started}
            moved = next(s for s in by_id.values() if s.replica_id == "b")
            await moved.aclose()
            await eventually(lambda: len(b.engine.requests) == 2)
            for stream in by_id.values():
                await stream.aclose()
            assert is_clean(r)


async def test_the_longest_to_stay_go_first():
    with kept("a") as a, kept("b", max_running=0) as b:
        async with two_replicas(a, b, max_handovers=1) as (r, link_second):
            lengths = {"short": 1000, "longest": LONG, "long": 2000}
            started = [await begun(r, name, length) for name, length in lengths.items()]
            await link_second()
            await asyncio.to_thread(a.server.drain)
            await eventually(lambda: b.engine.requests)
            assert b.engine.requests[0].request_id.startswith("longest")
            for stream, _ in started:
                await stream.aclose()


async def test_what_still_waits_at_the_draining_replica_is_handed_over_too():
    with kept("a", max_running=1) as a, kept("b") as b:
        async with two_replicas(a, b) as (r, link_second):
            running, received = await begun(r, "running", 1000)
            waiting = await r.router.submit(request("waiting", max_tokens=100), anyone())
            await eventually(lambda: a.engine.waiting)
            await link_second()
            await asyncio.to_thread(a.server.drain)
            assert tokens(await collect(waiting)) == expected(100)
            assert received + tokens(await collect(running)) == expected(1000)
            assert r.metrics.reasons["drain"] == 2
            assert len(r.metrics.pauses_s) == 1, "the other one had not begun"


async def test_without_another_replica_streams_end_where_they_are_until_one_comes():
    with kept("a") as a, kept("b") as b:
        async with two_replicas(a, b) as (r, link_second):
            stream, received = await begun(r, "r", LONG)
            await asyncio.to_thread(a.server.drain)
            received += tokens([await anext(stream) for _ in range(5)])
            assert stream.replica_id == "a"
            await link_second()
            await eventually(lambda: stream.replica_id == "b")
            assert received + tokens(await collect(stream)) == expected(LONG)


async def test_a_full_replica_takes_no_streams_over():
    with kept("a") as a, kept("b", max_running=0) as b:
        async with two_replicas(a, b, max_waiting_requests=1) as (r, link_second):
            started = []
            for i in range(3):
                # A queue of one is full until a report says that its request runs.
                await eventually(lambda: takes_requests(r))
                started.append(await begun(r, f"r{i}", LONG))
            await link_second()
            await asyncio.to_thread(a.server.drain)
            await eventually(lambda: len(a.engine.running) == 2 and b.engine.waiting)
            # From now on it is full by its own report only.
            await eventually(lambda: not r.admission.ledger.at("b").num_unseen)
            assert (len(a.engine.running), len(b.engine.waiting)) == (2, 1)
            for stream, _ in started:
                await stream.aclose()
            assert is_clean(r)


async def test_it_can_be_switched_off():
    with kept("a") as a, kept("b") as b:
        async with two_replicas(a, b, max_handovers=0) as (r, link_second):
            stream, received = await begun(r, "r", 200)
            await link_second()
            await asyncio.to_thread(a.server.drain)
            assert received + tokens(await collect(stream)) == expected(200)
            assert b.engine.requests == []


@pytest.mark.nightly
async def test_a_handover_is_no_loss_however_often_it_happens():
    names = "abcde"
    with contextlib.ExitStack() as stack:
        replicas = {name: stack.enter_context(kept(name)) for name in names}
        async with routed(*replicas.values(), settings=RouterSettings(max_moves=0)) as r:
            stream, received = await begun(r, "r", LONG)
            for _ in range(len(names) - 1):
                leaving = replicas.pop(stream.replica_id)
                await asyncio.to_thread(leaving.server.drain)
                await eventually(lambda: stream.replica_id in replicas)
            assert received + tokens(await collect(stream)) == expected(LONG)
            assert r.metrics.reasons["drain"] == len(names) - 1


async def test_a_replica_that_is_killed_in_its_drain_loses_nothing_either():
    with kept("a") as a, kept("b") as b:
        async with two_replicas(a, b, max_handovers=2) as (r, link_second):
            started = [await begun(r, f"r{i}", 1000) for i in range(12)]
            await link_second()
            await asyncio.to_thread(a.server.drain)
            await eventually(lambda: b.engine.requests)
            await asyncio.to_thread(a.kill)
            for stream, received in started:
                assert received + tokens(await collect(stream)) == expected(1000)
            assert is_clean(r)


async def test_a_stalled_replica_is_not_chosen():
    seconds = itertools.count(step=1000.0)
    with kept("a") as a, kept("b") as b:
        async with routed(a, b) as r:
            stalled = LoadView(1.0, clock=lambda: next(seconds))
            stalled.update(ReplicaLoad(EngineStats(num_running=1), 0, is_draining=False))
            r.router._links["a"].load = stalled
            stalled.update = lambda load: None
            assert stalled.is_stalled
            for i in range(6):
                await collect(await r.router.submit(request(f"r{i}", [i]), anyone()))
            assert (a.engine.num_finished, b.engine.num_finished) == (0, 6)


async def test_a_replica_that_comes_takes_its_share_of_what_waits_and_nothing_that_runs():
    with kept("a", max_running=2) as a, kept("b") as b:
        async with two_replicas(a, b) as (r, link_second):
            running = [await begun(r, f"running{i}", 1000) for i in range(2)]
            waiting = [
                await r.router.submit(request(f"w{i}", max_tokens=50), anyone()) for i in range(10)
            ]
            link = r.router._links["a"]
            await eventually(lambda: link.load.num_waiting == 10)
            await link_second()
            assert [stream.replica_id for stream in waiting] == ["a"] * 5 + ["b"] * 5
            assert [stream.replica_id for stream, _ in running] == ["a", "a"]
            for stream in waiting:
                assert tokens(await collect(stream)) == expected(50)
            for stream, received in running:
                assert received + tokens(await collect(stream)) == expected(1000)
            assert r.metrics.reasons == {"only": 12, "spread": 5}
            assert r.metrics.pauses_s == []
            assert is_clean(r)


async def test_a_connection_that_comes_back_is_no_new_replica():
    with kept("a", max_running=1) as a, kept("b", max_running=0) as b:
        async with routed(a, b) as r:
            started = [
                await r.router.submit(request(f"r{i}", max_tokens=LONG), anyone()) for i in range(8)
            ]
            await eventually(lambda: a.engine.waiting)
            r.router._links["b"]._writer.abort()
            await eventually(lambda: r.router.num_connected_replicas == 1)
            await eventually(lambda: r.router.num_connected_replicas == 2)
            assert r.metrics.reasons["spread"] == 0
            for stream in started:
                await stream.aclose()
            assert is_clean(r)
