"""How an ingress leaves: when it is replaced, and when the whole service ends.

Knows servers and the number of live requests. Knows no model, no Serve and no registry.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

import grpc

from service.api.grpc_calls_under_way import CallsUnderWay
from service.deployments.bounded_http import LINGER_S
from service.deployments.listeners import HttpServer

logger = logging.getLogger(__name__)

LAST_BYTES_S = 3.0
"""For answers that are still being written. Only calls that never end make it last so long."""
_POLL_S = 0.05


class LiveRequests(Protocol):
    """What an ingress counts of its requests."""

    @property
    def is_draining(self) -> bool:
        """Whether new requests are refused."""

    @property
    def num_live_requests(self) -> int: ...

    def begin_drain(self) -> None: ...


class Departure:
    """run() once. end_requests fails every live request with a typed error and counts them.

    calls: of the gRPC server.
    """

    def __init__(
        self,
        http: HttpServer | None,
        rpc: grpc.aio.Server | None,
        calls: CallsUnderWay,
        requests: LiveRequests,
        end_requests: Callable[[], int],
        drain_timeout_s: float,
    ) -> None:
        self._http = http
        self._rpc = rpc
        self._calls = calls
        self._requests = requests
        self._end_requests = end_requests
        self._drain_timeout_s = drain_timeout_s

    async def run(self) -> None:
        """Let what was admitted finish within the drain timeout, then end the servers.

        If the service as a whole drains, new requests have been refused since. If not, others
        go on listening on the same port: this ingress hands them all new connections and still
        serves what comes over those that are open.
        """
        end_s = time.monotonic() + self._drain_timeout_s
        leaving = None
        if not self._requests.is_draining:
            leaving = await self._hand_over()
            await self._wait_for_silence(end_s)
            self._requests.begin_drain()
        await self._wait_for_end(end_s)
        num_cut = self._end_requests()
        if num_cut:
            logger.warning(
                "the drain ended after %.0f s with %d requests under way: they end with an error",
                self._drain_timeout_s,
                num_cut,
            )
        await self._stop(end_s)
        if leaving is not None:
            await leaving

    async def _hand_over(self) -> "asyncio.Task[None] | None":
        if self._http is not None:
            await self._http.stop_accepting()
        if self._rpc is None:
            return None
        # Clients are told to go elsewhere with their next call; those under way have their time.
        stopping = asyncio.create_task(self._rpc.stop(self._drain_timeout_s + LAST_BYTES_S))
        await asyncio.sleep(0)
        return stopping

    async def _wait_for_silence(self, end_s: float) -> None:
        """Until nobody is connected over HTTP and no request has been live for LINGER_S.

        Idle connections are closed meanwhile; refusing before they are would fail a request.
        """
        last_busy_s = time.monotonic()
        while (now_s := time.monotonic()) < end_s:
            if self._requests.num_live_requests or (self._http and self._http.num_connections):
                last_busy_s = now_s
            elif now_s - last_busy_s >= LINGER_S:
                return
            await asyncio.sleep(_POLL_S)

    async def _wait_for_end(self, end_s: float) -> None:
        while self._requests.num_live_requests and time.monotonic() < end_s:
            await asyncio.sleep(_POLL_S)

    async def _stop(self, end_s: float) -> None:
        if self._rpc is not None:
            # Their requests have ended here, and may not yet have at clients that read slowly.
            num_unread = await self._calls.wait(max(0.0, end_s - time.monotonic()))
            if num_unread:
                logger.warning("%d gRPC calls had not been read when the drain ended", num_unread)
            # Health watches never end by themselves, so the grace is for last bytes only.
            await self._rpc.stop(LAST_BYTES_S)
        if self._http is not None:
            # Answers may have ended here and not yet at a client that reads slowly.
            await self._http.stop_within(max(LAST_BYTES_S, end_s - time.monotonic()))
