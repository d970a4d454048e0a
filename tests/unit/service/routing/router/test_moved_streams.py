"""A stream outlives its replica: no token is lost or doubled, and there is an end to it."""

import asyncio
import contextlib
import time

import pytest

from service.errors import ApiError, ApiErrorCode
from service.observability.request_log.record import RequestRecord
from service.request_context import RequestContext
from service.routing.policy import RouterSettings
from service.routing.routed_stream import RoutedStream
from service.routing.suspects import TRIAL_TOKENS
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import FAST, FakeReplica, eventually
from tests.unit.service.routing.router.test_router import anyone, collect, request, routed, tokens
from workers.engine.protocol import FinishReason, GenerateRequest, OutputError, StepOutput
from workers.errors import ErrorCode
from workers.sampling.params import SamplingParams

pytestmark = pytest.mark.asyncio

# At two milliseconds each: time for all that happens to a stream on its way.
NUM_TOKENS = 500
EXPECTED = list(range(6, 6 + NUM_TOKENS))
SLOW_CHANNEL = FAST.model_copy(update={"load_interval_s": 0.002})


class KeepingEngine(FakeEngine):
    """Keeps what it was sent."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.requests: list[GenerateRequest] = []

    def submit(self, request):
        self.requests.append(request)
        super().submit(request)


def kept(name, **settings):
    return FakeReplica(KeepingEngine(step_s=0.002, **settings), SLOW_CHANNEL, name)


async def begun(r, name="r", max_tokens=NUM_TOKENS):
    """A stream and the tokens that its reader has."""
    stream = await r.router.submit(request(name, max_tokens=max_tokens), anyone())
    return stream, tokens([await anext(stream)])


async def read_to_error(stream):
    received = []
    try:
        async for output in stream:
            received += output.token_ids
    except ApiError as error:
        return received, error
    raise AssertionError("the stream came to its end")


def is_clean(r):
    held = r.admission.num_live_requests, r.admission.queued_tokens
    return held == (0, 0) and r.router.num_waiting_requests == r.router.num_waiting_tokens == 0


async def test_another_replica_gets_what_was_received_and_the_same_seed():
    with kept("a") as a, kept("b") as b:
        async with routed(a) as r:
            stream, received = await begun(r)
            await r.router.update_replicas([a.address, b.address])
            await eventually(lambda: r.router.num_connected_replicas == 2)
            await asyncio.to_thread(a.kill)
            assert received + tokens(await collect(stream)) == EXPECTED
            (first,), (second,) = a.engine.requests, b.engine.requests
            assert second.sampling == first.sampling
            assert second.sampling.seed is not None
            assert second.prompt_token_ids == first.prompt_token_ids
            resumed = second.resumed_token_ids
            assert resumed == EXPECTED[: len(resumed)]
            assert first.resumed_token_ids == []
            assert b.engine.num_output_tokens == NUM_TOKENS - len(resumed)
            assert is_clean(r)


async def test_what_the_reader_has_not_read_yet_stays():
    with kept("a") as a, kept("b") as b:
        async with routed(a, b) as r:
            stream = await r.router.submit(request(max_tokens=NUM_TOKENS), anyone())
            by_name = {"a": a, "b": b}
            lost = by_name.pop(stream.replica_id)
            await eventually(lambda: lost.engine.num_output_tokens > 20)
            await asyncio.to_thread(lost.kill)
            (other,) = by_name.values()
            await eventually(lambda: other.engine.num_finished == 1)
            assert tokens(await collect(stream)) == EXPECTED


async def test_a_stream_survives_more_lost_replicas_than_one_that_brings_them_down():
    names = "abcdef"
    with contextlib.ExitStack() as stack:
        replicas = {name: stack.enter_context(kept(name)) for name in names}
        async with routed(*replicas.values()) as r:
            stream, received = await begun(r)
            for _ in range(len(names) - 1):
                lost = replicas.pop(stream.replica_id)
                await asyncio.to_thread(lost.kill)
                while stream.replica_id not in replicas or stream.num_new_tokens < TRIAL_TOKENS:
                    received += tokens([await anext(stream)])
            assert received + tokens(await collect(stream)) == EXPECTED
            assert r.metrics.reasons["lost"] == len(names) - 1
            assert len(r.metrics.pauses_s) == len(names) - 1
            assert is_clean(r)


async def test_without_a_replica_a_stream_waits_for_the_next_one_before_new_requests():
    with kept("a") as a, kept("b", max_running=1) as b:
        async with routed(a) as r:
            stream, received = await begun(r)
            await asyncio.to_thread(a.kill)
            await eventually(lambda: r.router.num_waiting_requests == 1)
            assert r.router.num_waiting_tokens == r.admission.queued_tokens > 1
            assert r.router.demand_changed.is_set()
            await r.router.update_replicas([b.address])
            assert received + tokens(await collect(stream)) == EXPECTED
            assert is_clean(r)


@pytest.mark.parametrize("wait_s", [0.0, 0.1])
async def test_a_stream_that_nobody_takes_in_time_ends_with_replica_lost(wait_s):
    with kept("a") as a:
        async with routed(a, settings=RouterSettings(move_wait_s=wait_s)) as r:
            stream, received = await begun(r)
            started_s = time.monotonic()
            await asyncio.to_thread(a.kill)
            more, error = await read_to_error(stream)
            received += more
            assert time.monotonic() - started_s >= wait_s
            assert error.code is ApiErrorCode.REPLICA_LOST
            assert received == EXPECTED[: len(received)]
            assert is_clean(r)


async def test_the_time_to_wait_is_counted_from_the_first_loss_over_all_that_follow():
    settings = RouterSettings(move_wait_s=120.0)
    with kept("a") as a, kept("b", max_running=0) as b:
        async with routed(a, settings=settings) as r:
            stream, _ = await begun(r)
            await asyncio.to_thread(a.kill)
            await eventually(lambda: r.router.num_waiting_requests == 1)
            await r.router.update_replicas([b.address])
            await eventually(lambda: b.engine.waiting)
            stream.lost_s -= settings.move_wait_s + 1.0
            await asyncio.sleep(0.1)
            assert not stream.is_ended  # a replica has it: that is no waiting
            lost_s = time.monotonic()
            await asyncio.to_thread(b.kill)
            with pytest.raises(ApiError) as caught:
                await collect(stream)
            assert caught.value.code is ApiErrorCode.REPLICA_LOST
            assert time.monotonic() - lost_s < 60.0


async def test_a_begun_stream_that_is_refused_waits_until_somebody_has_room():
    with kept("a") as a, kept("b", max_waiting=0) as b:
        async with routed(a, settings=RouterSettings(max_moves=1)) as r:
            stream, received = await begun(r)
            await r.router.update_replicas([a.address, b.address])
            await eventually(lambda: r.router.num_connected_replicas == 2)
            await asyncio.to_thread(a.kill)
            await eventually(lambda: len(b.engine.requests) > 3)
            assert r.admission.num_live_requests == 1
            b.engine.max_waiting = 10
            assert received + tokens(await collect(stream)) == EXPECTED
            assert r.metrics.reasons["refused"] >= 2
            assert is_clean(r)


async def test_what_every_replica_refuses_is_sent_less_and_less_often_and_noted_so_often_only():
    with kept("a") as a, kept("b", max_waiting=0) as b:
        async with routed(a, settings=RouterSettings(max_moves=0)) as r:
            record = RequestRecord()
            endless = request(max_tokens=60_000)
            stream = await r.router.submit(endless, RequestContext(record=record))
            await anext(stream)
            await r.router.update_replicas([a.address, b.address])
            await eventually(lambda: r.router.num_connected_replicas == 2)
            await asyncio.to_thread(a.kill)
            await eventually(lambda: b.engine.requests)
            reports = record_reports(r.router._links["b"])
            await eventually(lambda: len(reports) > 40)
            assert 2 <= len(b.engine.requests) <= 10
            await stream.aclose()
            await eventually(lambda: record.num_moves == len(b.engine.requests))
            assert is_clean(r)


def record_reports(link):
    """What the link is told from now on."""
    reports, update = [], link.load.update

    def keep(load):
        reports.append(load)
        update(load)

    link.load.update = keep
    return reports


async def test_late_outputs_of_the_old_attempt_are_nobodys():
    with kept("a") as a:
        async with routed(a) as r:
            stream, received = await begun(r)
            link = r.router._links["a"]
            old_id = stream.attempt.request_id
            failed = OutputError(ErrorCode.ENGINE_FAILED, "it says so and goes on all the same")
            link._finish(StepOutput(old_id, [], FinishReason.ERROR, error=failed), 0.0)
            await eventually(lambda: len(a.engine.requests) == 2)  # the only one takes it again
            assert stream.attempt.request_id != old_id
            await eventually(lambda: len(a.engine.running) == 2)
            assert received + tokens(await collect(stream)) == EXPECTED


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (ErrorCode.QUEUE_FULL, "refused"),
        (ErrorCode.ENGINE_DRAINING, "drain"),
        (ErrorCode.ENGINE_FAILED, "lost"),
    ],
)
async def test_what_a_replica_cannot_go_on_with_another_one_does(code, reason):
    with kept("a") as a, kept("b") as b:
        async with routed(a) as r:
            stream, received = await begun(r)
            await r.router.update_replicas([a.address, b.address])
            await eventually(lambda: r.router.num_connected_replicas == 2)
            attempt_id, error = stream.attempt.request_id, OutputError(code, "no")
            failed = StepOutput(attempt_id, [], FinishReason.ERROR, error=error)
            r.router._links["a"]._finish(failed, 0.0)
            assert received + tokens(await collect(stream)) == EXPECTED
            assert r.metrics.reasons == {"only": 1, reason: 1}


async def test_what_is_the_requests_own_fault_is_not_moved():
    with kept("a") as a, kept("b") as b:
        async with routed(a, b) as r:
            stream, _ = await begun(r)
            fault = OutputError(ErrorCode.INTERNAL, "no number")
            failed = StepOutput(stream.attempt.request_id, [], FinishReason.ERROR, error=fault)
            r.router._links[stream.replica_id]._finish(failed, 0.0)
            outputs = await collect(stream)
            assert outputs[-1].error == fault
            assert sum(r.metrics.reasons.values()) == 1


async def test_a_reader_that_leaves_a_waiting_stream_leaves_nothing_behind():
    with kept("a") as a, kept("b") as b:
        async with routed(a) as r:
            stream, _ = await begun(r)
            await asyncio.to_thread(a.kill)
            await eventually(lambda: r.router.num_waiting_requests == 1)
            await stream.aclose()
            assert is_clean(r)
            await r.router.update_replicas([b.address])
            await eventually(lambda: r.router.num_connected_replicas == 1)
            assert b.engine.requests == []


async def test_closing_the_ingress_ends_a_stream_that_waits():
    with kept("a") as a:
        async with routed(a) as r:
            stream, _ = await begun(r)
            await asyncio.to_thread(a.kill)
            await eventually(lambda: r.router.num_waiting_requests == 1)
        with pytest.raises(ApiError) as caught:
            await asyncio.wait_for(collect(stream), 60.0)
        assert caught.value.code is ApiErrorCode.REPLICA_LOST


async def test_the_drain_of_the_ingress_ends_a_stream_that_waits_with_its_own_error():
    with kept("a") as a:
        async with routed(a) as r:
            stream, _ = await begun(r)
            await asyncio.to_thread(a.kill)
            await eventually(lambda: r.router.num_waiting_requests == 1)
            assert r.router.end_requests() == 1
            with pytest.raises(ApiError) as caught:
                await collect(stream)
            assert caught.value.code is ApiErrorCode.DRAINING
            assert is_clean(r)


async def test_a_record_has_every_route_and_counts_the_moves():
    with kept("a") as a, kept("b") as b:
        async with routed(a) as r:
            record = RequestRecord()
            context = RequestContext(record=record)
            stream = await r.router.submit(request(max_tokens=2 * NUM_TOKENS), context)
            await r.router.update_replicas([a.address, b.address])
            await eventually(lambda: r.router.num_connected_replicas == 2)
            await asyncio.to_thread(a.kill)
            await collect(stream)
            told = [(route.replica_id, route.reason) for route in record.routes]
            assert told == [("a", "only"), ("b", "lost")]
            assert record.num_moves == 1
            times_s = [t for route in record.routes for t in (route.started_s, route.ended_s)]
            assert times_s == sorted(times_s)
            assert record.started_s <= times_s[0] < times_s[-1] <= time.monotonic()


async def test_the_overhead_of_a_moved_request_is_that_of_its_last_replica():
    assert min([await overhead_behind_a_wait(0.6) for _ in range(3)]) < 0.5


async def overhead_behind_a_wait(wait_s):
    """Tried more than once: what a busy machine adds is not the same every time."""
    with kept("a") as a, kept("b") as b:
        async with routed(a) as r:
            stream, _ = await begun(r)
            await asyncio.to_thread(a.kill)
            await asyncio.sleep(wait_s)
            await r.router.update_replicas([b.address])
            await collect(stream)
            (overhead_s,) = r.metrics.overhead_s
            return overhead_s


async def test_a_request_without_a_limit_is_moved_as_well():
    with kept("a", default_max_tokens=50) as a, kept("b", default_max_tokens=50) as b:
        async with routed(a) as r:
            stream = await r.router.submit(GenerateRequest("r", [5], SamplingParams()), anyone())
            received = tokens([await anext(stream)])
            await r.router.update_replicas([a.address, b.address])
            await eventually(lambda: r.router.num_connected_replicas == 2)
            await asyncio.to_thread(a.kill)
            assert received + tokens(await collect(stream)) == EXPECTED[:50]


async def test_the_wait_after_losses_begins_with_the_first_of_them_not_with_a_hand_over():
    class Owner:
        def move(self, stream, *, is_replica_lost):
            """It waits."""

    stream = RoutedStream(request(), anyone(), Owner(), 1 << 20)
    stream.pause()
    handed_over_s = stream.lost_s
    await asyncio.sleep(0.01)
    stream.lose()
    first_s = stream.lost_s
    assert first_s >= handed_over_s + 0.01
    stream.lose()
    assert stream.lost_s == first_s
