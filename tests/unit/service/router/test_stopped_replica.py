"""A replica whose process is stopped has closed nothing: its silence is what ingresses notice."""

import asyncio
import signal
import time

import pytest

from service.api.errors import ApiError, ApiErrorCode
from tests.fakes.replica import FAST
from tests.fakes.replica_process import replica_process
from tests.unit.service.router.test_router import collect, request, routed, tokens

pytestmark = pytest.mark.asyncio


class Started:
    """What routed() asks of a replica."""

    def __init__(self, address):
        self.address = address


async def test_streams_of_a_stopped_process_end_with_one_error_at_the_heartbeat_timeout():
    with replica_process("a") as (process, address):
        async with routed(Started(address)) as r:
            stream = await r.router.submit(request(max_tokens=10_000))
            await anext(stream)
            process.send_signal(signal.SIGSTOP)
            stopped_s = time.monotonic()
            with pytest.raises(ApiError) as caught:
                await collect(stream)
            assert caught.value.code is ApiErrorCode.REPLICA_LOST
            assert time.monotonic() - stopped_s < 3 * FAST.heartbeat_timeout_s
            assert not r.router.is_ready


async def test_a_request_that_a_stopped_process_never_answered_is_answered_by_another():
    with replica_process("a") as (stopped, first), replica_process("b") as (_, second):
        async with routed(Started(first)) as r:
            stopped.send_signal(signal.SIGSTOP)
            stream = await r.router.submit(request(max_tokens=8))
            await r.router.update_replicas([first, second])
            outputs = await asyncio.wait_for(collect(stream), 10)
            assert tokens(outputs) == list(range(6, 14))
            assert r.metrics.reasons["retry"] == 1
