"""The router over real channels: choice, waiting, refusals, and an end for every request."""

import asyncio
import contextlib
from collections import Counter

import msgspec
import pytest

from service.errors import ApiError, ApiErrorCode
from service.request_context import RequestContext
from service.routing.admission import AdmissionSettings, IngressAdmission
from service.routing.policy import RouterSettings
from service.routing.router import Router
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import FAST, FakeReplica, eventually
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.errors import ErrorCode
from workers.sampling.params import MAX_SEED, SamplingParams

pytestmark = pytest.mark.asyncio


def anyone():
    """The context of a call of its own."""
    return RequestContext()


class Metrics:
    """Counts what the router reports."""

    def __init__(self):
        self.reasons: Counter[str] = Counter()
        self.overhead_s: list[float] = []
        self.scale_up_waits_s: list[float] = []
        self.pauses_s: list[float] = []

    def on_routed(self, reason):
        self.reasons[reason.value] += 1

    def on_overhead(self, seconds):
        self.overhead_s.append(seconds)

    def on_pause(self, seconds):
        self.pauses_s.append(seconds)

    def on_scale_up_wait(self, seconds):
        self.scale_up_waits_s.append(seconds)


class Routed:
    """A router with its collaborators in reach."""

    def __init__(self, settings, channel, admission):
        self.metrics = Metrics()
        self.ingress = IngressAdmission(admission)
        (self.admission,) = self.ingress.models
        self.router = Router("in-1", "node-1", settings, channel, self.admission, self.metrics)


@contextlib.asynccontextmanager
async def routed(*replicas, settings=None, channel=FAST, admission=None):
    made = Routed(settings or RouterSettings(), channel, admission or AdmissionSettings())
    await made.router.update_replicas([replica.address for replica in replicas])
    await eventually(lambda: made.router.num_connected_replicas == len(replicas))
    yield made
    await made.router.aclose()


def request(request_id="r", prompt=(5,), max_tokens=8, salt=""):
    sampling = SamplingParams(max_tokens=max_tokens)
    return GenerateRequest(request_id, list(prompt), sampling, cache_salt=salt)


async def collect(stream):
    return [output async for output in stream]


def tokens(outputs):
    return [t for output in outputs for t in output.token_ids]


async def test_a_request_streams_to_its_end_and_leaves_nothing_behind():
    with FakeReplica() as replica:
        async with routed(replica) as r:
            outputs = await collect(await r.router.submit(request(), anyone()))
            assert tokens(outputs) == list(range(6, 14))
            assert r.metrics.reasons == {"only": 1}
            assert len(r.metrics.overhead_s) == 1
            assert 0 <= r.metrics.overhead_s[0] < 1
            assert r.admission.num_live_requests == r.admission.queued_tokens == 0
            assert r.router.info.name == "fake"


async def test_without_a_replica_submit_is_unavailable_and_so_is_the_info():
    async with routed() as r:
        with pytest.raises(ApiError) as caught:
            r.router.check_admission()
        assert caught.value.code is ApiErrorCode.UNAVAILABLE
        with pytest.raises(ApiError) as caught:
            await r.router.submit(request(), anyone())
        assert caught.value.code is ApiErrorCode.UNAVAILABLE
        assert caught.value.retry_after_s
        with pytest.raises(ApiError):
            _ = r.router.info
        assert not r.router.is_ready
        assert r.admission.num_live_requests == r.admission.queued_tokens == 0


async def test_every_request_has_its_seed_before_a_replica_sees_it():
    seen = []

    class KeepingEngine(FakeEngine):
        def submit(self, request):
            seen.append(request.sampling.seed)
            super().submit(request)

    with FakeReplica(KeepingEngine()) as replica:
        async with routed(replica) as r:
            for i in range(4):
                await collect(await r.router.submit(request(f"r{i}"), anyone()))
            sampling = SamplingParams(max_tokens=2, seed=-7)
            own = GenerateRequest("own", [5], sampling)
            await collect(await r.router.submit(own, anyone()))
    *drawn, given = seen
    assert given == -7
    assert len(set(drawn)) == 4
    assert all(0 <= seed <= MAX_SEED for seed in drawn)


async def test_requests_with_a_common_prefix_go_to_the_same_replica():
    with FakeReplica(replica_id="a") as a, FakeReplica(replica_id="b") as b:
        async with routed(a, b) as r:
            prompt = [7] * 256
            for i in range(8):
                await collect(
                    await r.router.submit(request(f"r{i}", prompt=[*prompt, i]), anyone())
                )
            assert {a.engine.num_finished, b.engine.num_finished} == {0, 8}
            assert r.metrics.reasons == {"load": 1, "prefix": 7}


async def test_concurrent_requests_without_a_common_prefix_spread():
    with (
        FakeReplica(FakeEngine(step_s=0.005), replica_id="a") as a,
        FakeReplica(FakeEngine(step_s=0.005), replica_id="b") as b,
    ):
        async with routed(a, b) as r:
            streams = [
                await r.router.submit(request(f"r{i}", prompt=[i] * 64), anyone())
                for i in range(40)
            ]
            await asyncio.gather(*map(collect, streams))
            assert a.engine.num_finished == b.engine.num_finished == 20


async def test_what_a_lost_replica_had_is_finished_elsewhere_begun_or_not():
    started = FakeEngine(step_s=0.005, max_running=1)
    with FakeReplica(started, replica_id="a") as a, FakeReplica(replica_id="b") as b:
        async with routed(a, settings=RouterSettings(imbalance_tokens=10**6)) as r:
            running = await r.router.submit(request("running", max_tokens=1000), anyone())
            received = tokens([await anext(running)])
            waiting = await r.router.submit(request("waiting", max_tokens=4), anyone())
            await r.router.update_replicas([a.address, b.address])
            await eventually(lambda: r.router.num_connected_replicas == 2)
            await asyncio.to_thread(a.kill)
            assert tokens(await collect(waiting)) == [6, 7, 8, 9]
            received += tokens(await collect(running))
            assert received == [(6 + i) % 4096 for i in range(1000)]
            assert r.metrics.reasons["lost"] == 2
            assert len(r.metrics.pauses_s) == 1
            assert r.admission.num_live_requests == r.admission.queued_tokens == 0
            assert [o async for o in running] == []


async def test_a_request_whose_replicas_were_lost_often_enough_ends_with_an_error():
    engines = [FakeEngine(step_s=0.005, max_running=0) for _ in range(2)]
    with (
        FakeReplica(engines[0], replica_id="a") as a,
        FakeReplica(engines[1], replica_id="b") as b,
    ):
        async with routed(a, b, settings=RouterSettings(max_losses=2)) as r:
            stream = await r.router.submit(request(), anyone())
            by_id = {"a": a, "b": b}
            first = by_id.pop(stream.replica_id)
            (second,) = by_id.values()
            await asyncio.to_thread(first.kill)
            await eventually(lambda: second.engine.waiting)
            await asyncio.to_thread(second.kill)
            with pytest.raises(ApiError) as caught:
                await collect(stream)
            assert caught.value.code is ApiErrorCode.REPLICA_LOST


async def test_a_request_lost_before_its_first_output_waits_for_a_replica():
    stuck = FakeEngine(max_running=0)
    with FakeReplica(stuck, replica_id="a") as a, FakeReplica(replica_id="b") as b:
        async with routed(a) as r:
            stream = await r.router.submit(request(), anyone())
            await eventually(lambda: stuck.waiting)
            await asyncio.to_thread(a.kill)
            await eventually(lambda: r.router.num_connected_replicas == 0)
            await r.router.update_replicas([b.address])
            assert tokens(await collect(stream)) == list(range(6, 14))
            assert r.metrics.reasons == {"only": 1, "lost": 1}
            assert r.admission.num_live_requests == 0


@pytest.mark.parametrize("wait_s", [0.0, 0.1])
async def test_a_request_does_not_wait_for_a_replica_for_ever(wait_s):
    stuck = FakeEngine(max_running=0)
    with FakeReplica(stuck) as replica:
        async with routed(replica, settings=RouterSettings(move_wait_s=wait_s)) as r:
            stream = await r.router.submit(request(), anyone())
            await eventually(lambda: stuck.waiting)
            await asyncio.to_thread(replica.kill)
            with pytest.raises(ApiError) as caught:
                await collect(stream)
            assert caught.value.code is ApiErrorCode.UNAVAILABLE
            assert r.admission.num_live_requests == 0


async def test_closing_the_router_ends_what_waits_for_a_replica():
    stuck = FakeEngine(max_running=0)
    with FakeReplica(stuck) as replica:
        async with routed(replica) as r:
            stream = await r.router.submit(request(), anyone())
            await eventually(lambda: stuck.waiting)
            await asyncio.to_thread(replica.kill)
            await eventually(lambda: r.router.num_connected_replicas == 0)
        with pytest.raises(ApiError):
            await asyncio.wait_for(collect(stream), 60.0)


async def test_a_refused_request_is_sent_elsewhere_though_its_session_lives_there():
    full = FakeEngine(step_s=0.005)
    with FakeReplica(full, replica_id="a") as a, FakeReplica(replica_id="b") as b:
        async with routed(a) as r:
            session = RequestContext(session="at home in a")
            await collect(await r.router.submit(request("first"), session))
            full.max_waiting = 0
            await r.router.update_replicas([a.address, b.address])
            await eventually(lambda: r.router.num_connected_replicas == 2)
            stream = await r.router.submit(request("refused"), session)
            assert stream.replica_id == "a"
            assert tokens(await collect(stream)) == list(range(6, 14))
            assert stream.replica_id == "b"
            assert (a.engine.num_finished, b.engine.num_finished) == (1, 1)
            assert r.metrics.reasons == {"only": 1, "session": 1, "refused": 1}


async def test_a_refusal_stands_when_there_is_nobody_else():
    with FakeReplica(FakeEngine(max_waiting=0)) as replica:
        async with routed(replica) as r:
            (output,) = await collect(await r.router.submit(request(), anyone()))
            assert output.finish_reason is FinishReason.ERROR
            assert output.error.code is ErrorCode.QUEUE_FULL
            assert r.admission.num_live_requests == r.admission.queued_tokens == 0


async def test_a_draining_replica_gets_nothing_and_finishes_what_it_has():
    slow = FakeEngine(step_s=0.01)
    with FakeReplica(slow, replica_id="a") as a:
        async with routed(a) as r:
            stream = await r.router.submit(request(max_tokens=20), anyone())
            first = await anext(stream)
            await asyncio.to_thread(a.server.drain)
            await eventually(lambda: not r.router.is_ready)
            with pytest.raises(ApiError) as caught:
                await r.router.submit(request("late"), anyone())
            assert caught.value.code is ApiErrorCode.UNAVAILABLE
            assert len(tokens([first, *await collect(stream)])) == 20


async def test_a_replica_that_is_gone_is_forgotten_with_its_cache():
    prompt = [7] * 256
    with FakeReplica(replica_id="a") as a:
        async with routed(a) as r:
            await collect(await r.router.submit(request("r0", prompt), anyone()))
            await asyncio.to_thread(a.kill)
            await eventually(lambda: r.router.num_connected_replicas == 0)
            await r.router.update_replicas([])
            with FakeReplica(replica_id="a") as again, FakeReplica(replica_id="b") as b:
                await r.router.update_replicas([again.address, b.address])
                await eventually(lambda: r.router.num_connected_replicas == 2)
                await collect(await r.router.submit(request("r1", [*prompt, 1]), anyone()))
    assert r.metrics.reasons == {"only": 1, "load": 1}


async def test_closing_a_stream_aborts_it_at_the_replica():
    with FakeReplica(FakeEngine(step_s=0.005)) as replica:
        async with routed(replica) as r:
            stream = await r.router.submit(request(max_tokens=10_000), anyone())
            await anext(stream)
            await stream.aclose()
            await stream.aclose()
            await eventually(lambda: not replica.engine.running)
            assert r.admission.num_live_requests == 0


async def test_a_client_that_does_not_read_loses_its_own_request_only():
    """After hundreds of outputs: a second's, for which the test itself may stand still."""
    channel = FAST.model_copy(update={"max_stream_bytes": 100_000})
    with FakeReplica(FakeEngine(step_s=0.001), settings=channel) as replica:
        async with routed(replica, channel=channel) as r:
            unread = await r.router.submit(request("unread", max_tokens=10_000), anyone())
            read = await r.router.submit(request("read", max_tokens=10_000), anyone())
            await anext(unread)
            await anext(read)
            assert len(replica.engine.running) == 2
            while len(replica.engine.running) == 2:
                await anext(read)
            for _ in range(100):
                await anext(read)
            with pytest.raises(ApiError) as caught:
                await collect(unread)
            assert caught.value.code is ApiErrorCode.TIMEOUT
            await read.aclose()


async def test_a_replica_no_longer_listed_stays_while_its_connection_lives():
    with FakeReplica(replica_id="a") as a:
        async with routed(a) as r:
            await r.router.update_replicas([])
            assert len(tokens(await collect(await r.router.submit(request(), anyone())))) == 8
            await asyncio.to_thread(a.kill)
            await eventually(lambda: r.router.num_connected_replicas == 0)
            await r.router.update_replicas([])
            with pytest.raises(ApiError):
                await r.router.submit(request("late"), anyone())


async def test_ending_all_requests_gives_each_one_typed_error_and_frees_the_engine():
    with FakeReplica(FakeEngine(step_s=0.005)) as replica:
        async with routed(replica) as r:
            streams = [
                await r.router.submit(request(f"r{i}", max_tokens=10_000), anyone())
                for i in range(3)
            ]
            await anext(streams[0])
            assert r.router.end_requests() == 3
            for stream in streams:
                with pytest.raises(ApiError) as caught:
                    await collect(stream)
                assert caught.value.code is ApiErrorCode.DRAINING
            await eventually(lambda: not replica.engine.has_work)
            assert r.admission.num_live_requests == r.admission.queued_tokens == 0
            assert r.router.end_requests() == 0


async def test_links_stand_when_all_replicas_that_were_named_are_connected():
    with FakeReplica(replica_id="a") as a, FakeReplica(replica_id="b") as b:
        async with routed(a) as r:
            assert r.router.is_linked
            await r.router.update_replicas([a.address, b.address])
            assert not r.router.is_linked
            await eventually(lambda: r.router.is_linked)


async def test_two_ingresses_that_know_nothing_of_a_session_send_it_to_the_same_replica():
    with FakeReplica(replica_id="a") as a, FakeReplica(replica_id="b") as b:
        async with routed(a, b) as one, routed(a, b) as two:
            for number in range(12):
                before = a.engine.num_finished
                context = RequestContext(session=f"session {number}")
                for name, r in (("one", one), ("two", two)):
                    prompt = [number] * 100 if r is one else [100 + number] * 100
                    await collect(
                        await r.router.submit(request(f"{name}{number}", prompt), context)
                    )
                assert a.engine.num_finished - before in (0, 2)
            assert one.metrics.reasons == two.metrics.reasons == {"session": 12}
            assert 0 < a.engine.num_finished < 24


async def test_the_prefix_of_a_request_that_has_ended_counts_until_its_replica_evicts_it():
    class EvictingEngine(FakeEngine):
        evicted_tokens = -1

        def stats(self):
            said = super().stats()
            return msgspec.structs.replace(said, evicted_ordinary=self.evicted_tokens)

    names = "ab"
    with contextlib.ExitStack() as stack:
        replicas = {
            name: stack.enter_context(FakeReplica(EvictingEngine(), replica_id=name))
            for name in names
        }
        async with routed(*replicas.values()) as r:
            prompt = [7] * 256
            for name in ("first", "second"):
                await collect(await r.router.submit(request(name, [*prompt, 1]), anyone()))
            assert r.metrics.reasons == {"load": 1, "prefix": 1}
            for replica in replicas.values():
                replica.engine.evicted_tokens = 10**9
            links = r.router._links.values()
            await eventually(lambda: all(link.load.evicted_ordinary == 10**9 for link in links))
            await collect(await r.router.submit(request("third", [*prompt, 1]), anyone()))
            assert r.metrics.reasons == {"load": 2, "prefix": 1}
