"""Streams beside the service's own calls: health watches and reflection.

They end when their client wants and need no key, so they have limits of their own: as many as the
server takes calls would shut everybody out.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
import grpc.aio

from service.api.grpc_calls import REFLECTION_PREFIXES, MethodHandler, Rpc
from service.security.connections import GrpcConnectionLimits

WATCH_METHOD = "/grpc.health.v1.Health/Watch"
_PREFIXES = (WATCH_METHOD, *REFLECTION_PREFIXES)


class SideStreams:
    """Which there are, the oldest first. A stream is the future that is done when it has to end."""

    def __init__(self, limits: GrpcConnectionLimits) -> None:
        self._limits = limits
        self._peers: dict[asyncio.Future[None], str] = {}
        self._num_of_peer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._peers)

    def enter(self, peer: str) -> "asyncio.Future[None] | None":
        """A new stream of that connection, for which the oldest of all may have to end; None if the
        connection has as many as it may."""
        if self._num_of_peer[peer] >= self._limits.max_side_streams_per_connection:
            return None
        if len(self._peers) >= self._limits.max_side_streams:
            oldest = next(iter(self._peers))
            self.leave(oldest)
            _end(oldest)
        stream: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._peers[stream] = peer
        self._num_of_peer[peer] += 1
        return stream

    def leave(self, stream: "asyncio.Future[None]") -> None:
        """Harmless if it has left."""
        peer = self._peers.pop(stream, None)
        if peer is not None:
            self._num_of_peer[peer] -= 1
            if not self._num_of_peer[peer]:
                del self._num_of_peer[peer]


class SideStreamInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Bounds the number and the age of side streams; lets all other calls through."""

    def __init__(self, limits: GrpcConnectionLimits) -> None:
        self._streams = SideStreams(limits)
        self._max_age_s = limits.max_side_stream_age_s

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_PREFIXES):
            return handler
        codecs = (handler.request_deserializer, handler.response_serializer)
        if handler.unary_stream is not None:
            bounded = self._bounded(handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(bounded, *codecs)
        return grpc.stream_stream_rpc_method_handler(self._bounded(handler.stream_stream), *codecs)

    def _bounded(self, method: Any) -> Any:
        async def call(requests: Any, rpc: Rpc) -> AsyncIterator[Any]:
            end = self._streams.enter(rpc.peer())
            if end is None:
                await rpc.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    "the connection has as many health watches and reflection streams as it may",
                )
            ageing = asyncio.get_running_loop().call_later(self._max_age_s, _end, end)
            try:
                async with aclosing(method(requests, rpc)) as answers:
                    async for answer in _until(end, answers):
                        yield answer
            finally:
                ageing.cancel()
                self._streams.leave(end)
            if end.done():
                await rpc.abort(grpc.StatusCode.UNAVAILABLE, "the stream had its time; ask again")

        return call


def _end(end: "asyncio.Future[None]") -> None:
    if not end.done():
        end.set_result(None)


async def _until(
    end: "asyncio.Future[None]", answers: AsyncGenerator[Any, None]
) -> AsyncIterator[Any]:
    """The answers that come before `end` is done."""
    while True:
        coming = asyncio.ensure_future(anext(answers, None))
        try:
            await asyncio.wait({coming, end}, return_when=asyncio.FIRST_COMPLETED)
            answer = coming.result() if coming.done() else None
        finally:
            coming.cancel()
            await asyncio.gather(coming, return_exceptions=True)
        if answer is None:
            return
        yield answer
