"""A replica whose process is stopped has closed nothing: its silence is what ingresses notice."""

import asyncio
import signal
import time
from pathlib import Path

import pytest

from service.errors import ApiError, ApiErrorCode
from service.routing.policy import RouterSettings
from tests.fakes.replica import FAST
from tests.fakes.replica_process import replica_process
from tests.unit.service.routing.router.test_router import anyone, collect, request, routed, tokens

pytestmark = pytest.mark.asyncio

# Processes that run must not fall silent on a machine that gives them no time for a second or two:
# what these tests show is that a stopped one is noticed by silence, and only by that.
PATIENT = FAST.model_copy(update={"heartbeat_timeout_s": 3.0, "handshake_timeout_s": 10.0})
# The watch looks every half heartbeat; the rest is what a busy machine takes to come to it.
LATEST_NOTICE_S = PATIENT.heartbeat_timeout_s + 30.0


class Started:
    """What routed() asks of a replica."""

    def __init__(self, address):
        self.address = address


async def stop(process):
    """Returns when every thread stands still: one that waits for a CPU runs on until it has it."""
    process.send_signal(signal.SIGSTOP)
    tasks = Path(f"/proc/{process.pid}/task")
    async with asyncio.timeout(LATEST_NOTICE_S):
        while not all(is_stopped(task) for task in tasks.iterdir()):
            await asyncio.sleep(0.001)


def is_stopped(task):
    name_and_more = (task / "stat").read_text()
    return name_and_more.rpartition(")")[2].split()[0] == "T"


async def test_streams_of_a_stopped_process_end_with_one_error_at_the_heartbeat_timeout():
    settings = RouterSettings(move_wait_s=0.0)
    with replica_process("a", PATIENT) as (process, address):
        async with routed(Started(address), channel=PATIENT, settings=settings) as r:
            stream = await r.router.submit(request(max_tokens=10_000), anyone())
            await anext(stream)
            stopped_s = time.monotonic()
            await stop(process)
            with pytest.raises(ApiError) as caught:
                await collect(stream)
            silent_s = time.monotonic() - stopped_s
            assert caught.value.code is ApiErrorCode.REPLICA_LOST
            assert PATIENT.heartbeat_timeout_s / 2 < silent_s < LATEST_NOTICE_S
            assert not r.router.is_ready


async def test_a_request_that_a_stopped_process_never_answered_is_answered_by_another():
    first, second = replica_process("a", PATIENT), replica_process("b", PATIENT)
    with first as (stopped, first_address), second as (_, second_address):
        async with routed(Started(first_address), channel=PATIENT) as r:
            await stop(stopped)
            stream = await r.router.submit(request(max_tokens=8), anyone())
            await r.router.update_replicas([first_address, second_address])
            outputs = await asyncio.wait_for(collect(stream), 2 * LATEST_NOTICE_S)
            assert tokens(outputs) == list(range(6, 14))
            assert r.metrics.reasons["lost"] == 1


async def test_a_stream_of_a_stopped_process_goes_on_at_another_token_for_token():
    first, second = replica_process("a", PATIENT), replica_process("b", PATIENT)
    with first as (stopped, first_address), second as (_, second_address):
        async with routed(Started(first_address), channel=PATIENT) as r:
            stream = await r.router.submit(request(max_tokens=400), anyone())
            received = tokens([await anext(stream)])
            await stop(stopped)
            await r.router.update_replicas([first_address, second_address])
            rest = await asyncio.wait_for(collect(stream), 2 * LATEST_NOTICE_S)
            assert received + tokens(rest) == list(range(6, 406))
            (pause_s,) = r.metrics.pauses_s
            assert pause_s < LATEST_NOTICE_S
            # What the stopped one had on its way when it goes on belongs to nobody.
            stopped.send_signal(signal.SIGCONT)


@pytest.mark.nightly
async def test_a_machine_that_stood_still_as_a_whole_loses_no_stream():
    with replica_process("a", PATIENT) as (process, address):
        async with routed(Started(address), channel=PATIENT) as r:
            stream = await r.router.submit(request(max_tokens=50), anyone())
            await stop(process)
            time.sleep(PATIENT.heartbeat_timeout_s + 1.0)
            process.send_signal(signal.SIGCONT)
            assert tokens(await collect(stream)) == list(range(6, 56))
            assert r.metrics.reasons == {"only": 1}
