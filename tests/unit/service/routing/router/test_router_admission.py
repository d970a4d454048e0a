"""What an ingress and its replicas take at once, and that whoever leaves gives its place back."""

import pytest

from service.errors import ApiError, ApiErrorCode
from service.routing.admission import AdmissionSettings
from service.routing.policy import RouterSettings
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import FakeReplica, eventually
from tests.unit.service.routing.router.test_router import (
    anyone,
    collect,
    request,
    routed,
    tokens,
)

pytestmark = pytest.mark.asyncio


async def test_a_full_replica_gets_nothing():
    busy = FakeEngine(step_s=0.01, max_running=0)
    with FakeReplica(busy) as replica:
        async with routed(replica, settings=RouterSettings(max_waiting_requests=3)) as r:
            streams = [await r.router.submit(request(f"r{i}"), anyone()) for i in range(3)]
            with pytest.raises(ApiError) as caught:
                await r.router.submit(request("late"), anyone())
            assert caught.value.code is ApiErrorCode.OVERLOADED
            for stream in streams:
                await stream.aclose()
            await eventually(lambda: not busy.waiting)


async def test_a_request_that_was_aborted_on_its_way_leaves_its_place_at_once():
    settings = RouterSettings(max_waiting_requests=1)
    with FakeReplica(FakeEngine(max_running=0)) as replica:
        async with routed(replica, settings=settings) as r:
            first = await r.router.submit(request("first"), anyone())
            with pytest.raises(ApiError):
                await r.router.submit(request("too many"), anyone())
            await first.aclose()
            second = await r.router.submit(
                request("second"), anyone()
            )  # no report has come between
            await second.aclose()


@pytest.mark.parametrize(("num_tokens", "is_taken"), [(99, True), (100, False)])
async def test_a_replica_is_full_when_as_many_tokens_are_queued_as_it_may_have(
    num_tokens, is_taken
):
    settings = RouterSettings(max_queued_tokens=100)
    with FakeReplica(FakeEngine(max_running=0)) as replica:
        async with routed(replica, settings=settings) as r:
            link = r.router._links["replica-1"]
            first = await r.router.submit(request("first", prompt=[1] * num_tokens), anyone())
            for is_reported in (False, True):
                if is_reported:
                    await eventually(lambda: link.load.queued_tokens == num_tokens)
                if is_taken:
                    r.router.check_admission()
                    continue
                with pytest.raises(ApiError) as caught:
                    r.router.check_admission()
                assert caught.value.code is ApiErrorCode.OVERLOADED
            await first.aclose()


async def test_admission_refuses_when_full_and_when_draining():
    admission = AdmissionSettings(max_live_requests=1, retry_after_s=7.0)
    with FakeReplica(FakeEngine(step_s=0.01)) as replica:
        async with routed(replica, admission=admission) as r:
            stream = await r.router.submit(request("one", max_tokens=10), anyone())
            with pytest.raises(ApiError) as caught:
                await r.router.submit(request("two"), anyone())
            assert caught.value.code is ApiErrorCode.OVERLOADED
            r.ingress.begin_drain()
            assert not r.router.is_ready
            with pytest.raises(ApiError) as caught:
                await r.router.submit(request("three"), anyone())
            assert caught.value.code is ApiErrorCode.DRAINING
            assert caught.value.retry_after_s == 7.0
            assert len(tokens(await collect(stream))) == 10


async def test_a_refusal_is_known_before_a_prompt_is_tokenised():
    with FakeReplica(FakeEngine(step_s=0.01)) as replica:
        async with routed(replica, admission=AdmissionSettings(max_live_requests=1)) as r:
            r.router.check_admission()
            stream = await r.router.submit(request("one", max_tokens=10), anyone())
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
            stream = await r.router.submit(request("big", prompt=[1] * 200), anyone())
            with pytest.raises(ApiError) as caught:
                await r.router.submit(request("small"), anyone())
            assert caught.value.code is ApiErrorCode.OVERLOADED
            await stream.aclose()
            assert r.admission.queued_tokens == 0
