"""The router over real channels: choice, admission, retry, and an end for every request."""

import asyncio
import contextlib
from collections import Counter

import pytest

from service.admission import AdmissionSettings, IngressAdmission
from service.api.errors import ApiError, ApiErrorCode
from service.router import Router
from service.routing_policy import RouterSettings
from service.session import make_session_key, set_session_key
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import FAST, FakeReplica, eventually
from workers.errors import ErrorCode
from workers.protocol import FinishReason, GenerateRequest
from workers.sampling.params import SamplingParams

pytestmark = pytest.mark.asyncio


class Metrics:
    """Counts what the router reports."""

    def __init__(self):
        self.reasons: Counter[str] = Counter()
        self.overhead_s: list[float] = []
        self.scale_up_waits_s: list[float] = []

    def on_routed(self, reason):
        self.reasons[reason.value] += 1

    def on_overhead(self, seconds):
        self.overhead_s.append(seconds)

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
            outputs = await collect(await r.router.submit(request()))
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
            await r.router.submit(request())
        assert caught.value.code is ApiErrorCode.UNAVAILABLE
        assert caught.value.retry_after_s
        with pytest.raises(ApiError):
            _ = r.router.info
        assert not r.router.is_ready
        assert r.admission.num_live_requests == r.admission.queued_tokens == 0


async def test_requests_with_a_common_prefix_go_to_the_same_replica():
    with FakeReplica(replica_id="a") as a, FakeReplica(replica_id="b") as b:
        async with routed(a, b) as r:
            prompt = [7] * 256
            for i in range(8):
                await collect(await r.router.submit(request(f"r{i}", prompt=[*prompt, i])))
            assert {a.engine.num_finished, b.engine.num_finished} == {0, 8}
            assert r.metrics.reasons == {"load": 1, "prefix": 7}


async def test_concurrent_requests_without_a_common_prefix_spread():
    with (
        FakeReplica(FakeEngine(step_s=0.005), replica_id="a") as a,
        FakeReplica(FakeEngine(step_s=0.005), replica_id="b") as b,
    ):
        async with routed(a, b) as r:
            streams = [await r.router.submit(request(f"r{i}", prompt=[i] * 64)) for i in range(40)]
            await asyncio.gather(*map(collect, streams))
            assert a.engine.num_finished == b.engine.num_finished == 20


async def test_what_had_no_output_finishes_elsewhere_and_the_rest_gets_one_typed_error():
    started = FakeEngine(step_s=0.005, max_running=1)
    with FakeReplica(started, replica_id="a") as a, FakeReplica(replica_id="b") as b:
        async with routed(a, settings=RouterSettings(imbalance_tokens=10**6)) as r:
            running = await r.router.submit(request("running", max_tokens=10_000))
            await anext(running)
            waiting = await r.router.submit(request("waiting", max_tokens=4))
            await r.router.update_replicas([a.address, b.address])
            await eventually(lambda: r.router.num_connected_replicas == 2)
            await asyncio.to_thread(a.kill)
            assert tokens(await collect(waiting)) == [6, 7, 8, 9]
            with pytest.raises(ApiError) as caught:
                await collect(running)
            assert caught.value.code is ApiErrorCode.REPLICA_LOST
            assert r.metrics.reasons["retry"] == 1
            assert r.admission.num_live_requests == r.admission.queued_tokens == 0
            assert [o async for o in running] == []


async def test_a_request_lost_twice_ends_with_an_error():
    engines = [FakeEngine(step_s=0.005, max_running=0) for _ in range(2)]
    with (
        FakeReplica(engines[0], replica_id="a") as a,
        FakeReplica(engines[1], replica_id="b") as b,
    ):
        async with routed(a, b) as r:
            stream = await r.router.submit(request())
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
            stream = await r.router.submit(request())
            await eventually(lambda: stuck.waiting)
            await asyncio.to_thread(a.kill)
            await eventually(lambda: r.router.num_connected_replicas == 0)
            await r.router.update_replicas([b.address])
            assert tokens(await collect(stream)) == list(range(6, 14))
            assert r.metrics.reasons == {"only": 1, "retry": 1}
            assert r.admission.num_live_requests == 0


@pytest.mark.parametrize("wait_s", [0.0, 0.1])
async def test_a_request_does_not_wait_for_a_replica_for_ever(wait_s):
    stuck = FakeEngine(max_running=0)
    with FakeReplica(stuck) as replica:
        async with routed(replica, settings=RouterSettings(retry_wait_s=wait_s)) as r:
            stream = await r.router.submit(request())
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
            stream = await r.router.submit(request())
            await eventually(lambda: stuck.waiting)
            await asyncio.to_thread(replica.kill)
            await eventually(lambda: r.router.num_connected_replicas == 0)
        with pytest.raises(ApiError):
            await asyncio.wait_for(collect(stream), 2.0)


async def test_a_refusal_is_retried_elsewhere():
    full = FakeEngine(step_s=0.005, max_waiting=0)
    with FakeReplica(full, replica_id="a") as a, FakeReplica(replica_id="b") as b:
        async with routed(a, b) as r:
            for i in range(10):
                stream = await r.router.submit(request(f"r{i}"))
                assert tokens(await collect(stream)) == list(range(6, 14))
            assert b.engine.num_finished == 10


async def test_a_refusal_stands_when_there_is_nobody_else():
    with FakeReplica(FakeEngine(max_waiting=0)) as replica:
        async with routed(replica) as r:
            (output,) = await collect(await r.router.submit(request()))
            assert output.finish_reason is FinishReason.ERROR
            assert output.error.code is ErrorCode.QUEUE_FULL
            assert r.admission.num_live_requests == r.admission.queued_tokens == 0


async def test_a_draining_replica_gets_nothing_and_finishes_what_it_has():
    slow = FakeEngine(step_s=0.01)
    with FakeReplica(slow, replica_id="a") as a:
        async with routed(a) as r:
            stream = await r.router.submit(request(max_tokens=20))
            first = await anext(stream)
            await asyncio.to_thread(a.server.drain)
            await eventually(lambda: not r.router.is_ready)
            with pytest.raises(ApiError) as caught:
                await r.router.submit(request("late"))
            assert caught.value.code is ApiErrorCode.UNAVAILABLE
            assert len(tokens([first, *await collect(stream)])) == 20


async def test_a_full_replica_gets_nothing():
    busy = FakeEngine(step_s=0.01, max_running=0)
    with FakeReplica(busy) as replica:
        async with routed(replica, settings=RouterSettings(max_waiting_requests=3)) as r:
            streams = [await r.router.submit(request(f"r{i}")) for i in range(3)]
            with pytest.raises(ApiError) as caught:
                await r.router.submit(request("late"))
            assert caught.value.code is ApiErrorCode.OVERLOADED
            for stream in streams:
                await stream.aclose()
            await eventually(lambda: not busy.waiting)


async def test_closing_a_stream_aborts_it_at_the_replica():
    with FakeReplica(FakeEngine(step_s=0.005)) as replica:
        async with routed(replica) as r:
            stream = await r.router.submit(request(max_tokens=10_000))
            await anext(stream)
            await stream.aclose()
            await stream.aclose()
            await eventually(lambda: not replica.engine.running)
            assert r.admission.num_live_requests == 0


async def test_a_client_that_does_not_read_loses_its_own_request_only():
    channel = FAST.model_copy(update={"max_stream_bytes": 5000})
    with FakeReplica(FakeEngine(step_s=0.001), settings=channel) as replica:
        async with routed(replica, channel=channel) as r:
            unread = await r.router.submit(request("unread", max_tokens=10_000))
            read = await r.router.submit(request("read", max_tokens=100))
            assert len(tokens(await collect(read))) == 100
            await eventually(lambda: not replica.engine.running)
            with pytest.raises(ApiError) as caught:
                await collect(unread)
            assert caught.value.code is ApiErrorCode.TIMEOUT


async def test_admission_refuses_when_full_and_when_draining():
    with FakeReplica(FakeEngine(step_s=0.01)) as replica:
        async with routed(replica, admission=AdmissionSettings(max_live_requests=1)) as r:
            stream = await r.router.submit(request("one", max_tokens=10))
            with pytest.raises(ApiError) as caught:
                await r.router.submit(request("two"))
            assert caught.value.code is ApiErrorCode.OVERLOADED
            r.ingress.begin_drain()
            assert not r.router.is_ready
            with pytest.raises(ApiError) as caught:
                await r.router.submit(request("three"))
            assert caught.value.code is ApiErrorCode.DRAINING
            assert caught.value.retry_after_s
            assert len(tokens(await collect(stream))) == 10


async def test_a_refusal_is_known_before_a_prompt_is_tokenised():
    with FakeReplica(FakeEngine(step_s=0.01)) as replica:
        async with routed(replica, admission=AdmissionSettings(max_live_requests=1)) as r:
            r.router.check_admission()
            stream = await r.router.submit(request("one", max_tokens=10))
            with pytest.raises(ApiError) as caught:
                r.router.check_admission()
            assert caught.value.code is ApiErrorCode.OVERLOADED
            await stream.aclose()
            r.router.check_admission()
            r.ingress.begin_drain()
            with pytest.raises(ApiError) as caught:
                r.router.check_admission()
            assert caught.value.code is ApiErrorCode.DRAINING


async def test_queued_prompt_tokens_are_bounded_but_an_idle_ingress_takes_any_prompt():
    admission = AdmissionSettings(max_queued_tokens=100)
    with FakeReplica(FakeEngine(step_s=0.01, max_running=0)) as replica:
        async with routed(replica, admission=admission) as r:
            stream = await r.router.submit(request("big", prompt=[1] * 200))
            with pytest.raises(ApiError) as caught:
                await r.router.submit(request("small"))
            assert caught.value.code is ApiErrorCode.OVERLOADED
            await stream.aclose()
            assert r.admission.queued_tokens == 0


async def test_a_replica_no_longer_listed_stays_while_its_connection_lives():
    with FakeReplica(replica_id="a") as a:
        async with routed(a) as r:
            await r.router.update_replicas([])
            assert len(tokens(await collect(await r.router.submit(request())))) == 8
            await asyncio.to_thread(a.kill)
            await eventually(lambda: r.router.num_connected_replicas == 0)
            await r.router.update_replicas([])
            with pytest.raises(ApiError):
                await r.router.submit(request("late"))


async def test_ending_all_requests_gives_each_one_typed_error_and_frees_the_engine():
    with FakeReplica(FakeEngine(step_s=0.005)) as replica:
        async with routed(replica) as r:
            streams = [await r.router.submit(request(f"r{i}", max_tokens=10_000)) for i in range(3)]
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
                set_session_key(make_session_key("caller", "", f"session {number}"))
                for name, r in (("one", one), ("two", two)):
                    prompt = [number] * 100 if r is one else [100 + number] * 100
                    await collect(await r.router.submit(request(f"{name}{number}", prompt)))
                assert a.engine.num_finished - before in (0, 2)
            assert one.metrics.reasons == two.metrics.reasons == {"session": 12}
            assert 0 < a.engine.num_finished < 24
