"""Calls beside the service's own: health and reflection.

They want no key, or none of ours, and some never end by themselves. So they have places of their
own, taken before anything of them is read: as many as the server takes calls would shut everybody
out.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, aclosing, contextmanager
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from service.api.grpc_calls import HEALTH_PREFIX, REFLECTION_PREFIXES, MethodHandler, Rpc
from service.api.grpc_doorkeeper import Doorkeeper
from service.security.connections import GrpcConnectionLimits

MAX_READING = 1
"""Calls whose message is on its way for longer than READING_S: it may be as large as any."""
READING_S = 0.1
_MAX_MESSAGE_BYTES = 4096
_PREFIXES = (HEALTH_PREFIX, *REFLECTION_PREFIXES)
_Status = tuple[grpc.StatusCode, str]
_HAD_ITS_TIME = (grpc.StatusCode.UNAVAILABLE, "the stream had its time; ask again")
_IN_VAIN = (grpc.StatusCode.DEADLINE_EXCEEDED, "the call's message did not arrive in time")
_TOO_MANY = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    "the connection has as many health and reflection calls as it may",
)
_MALFORMED = (grpc.StatusCode.INVALID_ARGUMENT, "the call has no message that can be read")


class SideStreams:
    """Which there are, the oldest first. A stream is the future that is done when it has to end."""

    def __init__(self, limits: GrpcConnectionLimits) -> None:
        self._limits = limits
        self._peers: dict[asyncio.Future[None], str] = {}
        self._num_of_peer: Counter[str] = Counter()
        self._reading: dict[asyncio.Future[None], float] = {}

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

    @contextmanager
    def reading(self, stream: "asyncio.Future[None]") -> Iterator[None]:
        """The stream's message is awaited. It may end for younger ones if that takes long."""
        loop = asyncio.get_running_loop()
        began_s = self._reading[stream] = loop.time()
        if len(self._reading) > MAX_READING:
            loop.call_later(READING_S, self._end_slow_ones, began_s)
        try:
            yield
        finally:
            self._reading.pop(stream, None)

    def _end_slow_ones(self, last_began_s: float) -> None:
        """last_began_s: not the time now less READING_S, which rounding puts before it."""
        slow = [stream for stream, began_s in self._reading.items() if began_s <= last_began_s]
        for stream in slow[: max(0, len(slow) - MAX_READING)]:
            del self._reading[stream]
            _end(stream)


class SideStreamInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Bounds the number and the age of side streams; lets all other calls through.

    A stream that has to end does so here whether its client reads or not: then it is the
    doorkeeper's.
    """

    def __init__(self, limits: GrpcConnectionLimits, doorkeeper: Doorkeeper) -> None:
        self._streams = SideStreams(limits)
        self._limits = limits
        self._doorkeeper = doorkeeper

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler:
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_PREFIXES):
            return handler

        async def call(_: object, rpc: Rpc) -> None:
            status = await self._serve(handler, rpc)
            if status is not None:
                await self._doorkeeper.end(rpc.peer(), rpc.abort(*status))

        # A handler of this kind is called before anything has been read.
        return grpc.stream_stream_rpc_method_handler(call)

    async def _serve(self, handler: MethodHandler, rpc: Rpc) -> _Status | None:
        """How the call has to end; None if it has ended well."""
        stream = self._streams.enter(rpc.peer())
        if stream is None:
            return _TOO_MANY
        is_read = self._streams.reading(stream)
        call = _SideCall(handler, rpc, is_read, self._limits.receive_timeout_s)
        work = asyncio.create_task(call.run())
        try:
            either: set[asyncio.Future[Any]] = {work, stream}
            await asyncio.wait(
                either,
                timeout=self._limits.max_side_stream_age_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            return work.result() if work.done() else _HAD_ITS_TIME
        finally:
            self._streams.leave(stream)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)


class _SideCall:
    """A call of a handler that gRPC's own packages made, whatever its kind.

    reading: entered while the message of a call that has one is awaited.
    """

    def __init__(
        self,
        handler: MethodHandler,
        rpc: Rpc,
        reading: AbstractContextManager[None],
        receive_timeout_s: float,
    ) -> None:
        self._rpc = rpc
        self._handler: Any = handler
        self._reading = reading
        self._receive_timeout_s = receive_timeout_s

    async def run(self) -> _Status | None:
        """Answer it. Returns how it has to end if its messages are wrong or do not come."""
        try:
            # Apart from the first answer: what waits for room could not be ended otherwise.
            await self._rpc.send_initial_metadata(())
            await self._answer()
        except TimeoutError:
            return _IN_VAIN
        except (DecodeError, EOFError):
            return _MALFORMED
        return None

    async def _answer(self) -> None:
        handler = self._handler
        if handler.stream_stream is not None:
            await self._write_all(handler.stream_stream(self._requests(), self._rpc))
            return
        with self._reading:
            async with asyncio.timeout(self._receive_timeout_s):
                request = await self._read()
        if handler.unary_stream is not None:
            await self._write_all(handler.unary_stream(request, self._rpc))
        else:
            await self._write(await handler.unary_unary(request, self._rpc))

    async def _requests(self) -> AsyncIterator[Any]:
        while True:
            try:
                request = await self._read()
            except EOFError:
                return
            yield request

    async def _read(self) -> Any:
        """Raises DecodeError, or EOFError at the end."""
        data = await self._rpc.read()
        if not isinstance(data, bytes):
            raise EOFError
        if len(data) > _MAX_MESSAGE_BYTES:
            raise DecodeError
        return self._handler.request_deserializer(data)

    async def _write_all(self, answers: AsyncGenerator[Any, None]) -> None:
        async with aclosing(answers):
            async for answer in answers:
                await self._write(answer)

    async def _write(self, answer: Any) -> None:
        await self._rpc.write(self._handler.response_serializer(answer))


def _end(stream: "asyncio.Future[None]") -> None:
    if not stream.done():
        stream.set_result(None)
