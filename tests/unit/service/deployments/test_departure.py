"""How an ingress leaves: handed over, drained, or cut off with an error for everyone."""

import asyncio
import logging
import time

import pytest

from service.deployments.bounded_http import LINGER_S
from service.deployments.departure import LAST_BYTES_S, Departure

pytestmark = pytest.mark.asyncio


class Parts:
    """HTTP server, gRPC server and admission in one; notes what was done to it in order."""

    def __init__(self, num_live=0, is_draining=False):
        self.num_live_requests = num_live
        self.num_connections = 0
        self.is_draining = is_draining
        self.done = []

    def begin_drain(self):
        self.done.append("refuse")
        self.is_draining = True

    async def stop_accepting(self):
        self.done.append("stop accepting")

    async def stop_within(self, timeout_s):
        self.done.append("stop http")

    async def wait(self, timeout_s):
        self.done.append("wait for calls")
        return 0

    async def stop(self, grace_s):
        self.done.append("go away" if grace_s > LAST_BYTES_S else "stop grpc")

    def end_requests(self):
        ended, self.num_live_requests = self.num_live_requests, 0
        self.done.append(f"ended {ended}")
        return ended

    async def leave(self, drain_timeout_s):
        await Departure(self, self, self, self, self.end_requests, drain_timeout_s).run()


async def test_a_replaced_ingress_hands_over_before_it_refuses_anything():
    parts = Parts()
    await parts.leave(10.0)
    assert parts.done == [
        "stop accepting",
        "go away",
        "refuse",
        "ended 0",
        "wait for calls",
        "stop grpc",
        "stop http",
    ]


async def test_it_stays_while_requests_live_and_a_little_longer():
    parts = Parts(num_live=1)
    leaving = asyncio.create_task(parts.leave(120.0))
    await asyncio.sleep(0.3)
    assert not parts.is_draining
    ended_s = time.monotonic()
    parts.num_live_requests = 0
    await leaving
    assert LINGER_S - 0.2 < time.monotonic() - ended_s < 60.0, "long before the drain's end"


async def test_it_refuses_nothing_while_a_client_is_connected():
    parts = Parts()
    parts.num_connections = 1
    leaving = asyncio.create_task(parts.leave(10.0))
    await asyncio.sleep(LINGER_S + 0.5)
    assert not parts.is_draining
    parts.num_connections = 0
    await leaving


async def test_a_service_that_drains_goes_on_listening_to_refuse():
    parts = Parts(num_live=1, is_draining=True)
    leaving = asyncio.create_task(parts.leave(10.0))
    await asyncio.sleep(0.2)
    assert parts.done == []
    parts.num_live_requests = 0
    await leaving
    assert parts.done == ["ended 0", "wait for calls", "stop grpc", "stop http"]


@pytest.mark.parametrize("is_draining", [True, False])
async def test_requests_longer_than_the_drain_get_an_error_and_a_line_counts_them(
    is_draining, caplog
):
    parts = Parts(num_live=3, is_draining=is_draining)
    started_s = time.monotonic()
    with caplog.at_level(logging.WARNING, logger="service.deployments.departure"):
        await parts.leave(0.3)
    assert 0.3 <= time.monotonic() - started_s < 60.0, "requests that nobody ends live for ever"
    assert parts.done.index("ended 3") < parts.done.index("stop http")
    (record,) = caplog.records
    assert "with 3 requests under way" in record.getMessage()
