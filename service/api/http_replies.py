"""HTTP responses: JSON, errors and event streams that end what they stand for."""

import asyncio
import itertools
import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.error_shapes import shape_error
from service.api.openai.wire import encode_json
from service.api.renderer import Renderer
from service.errors import ApiError, ApiErrorCode
from service.handler.events import ChoiceDelta
from service.handler.generation import Generation
from service.observability.request_log.record import RequestRecord

T = TypeVar("T")
_MAX_MADE_BYTES = 1 << 20
"""Of a body before its client has taken any of it."""
_log = logging.getLogger(__name__)


def json_response(content: Any, status_code: int = 200) -> Response:
    return Response(encode_json(content), status_code, media_type="application/json")


async def response_in_pieces(pieces: Iterator[bytes]) -> Response:
    """A JSON body that is made piece by piece; other tasks run between two of them. Of a large one
    the rest is made as the client takes it, so that nobody who does not read fills our memory."""
    made, num_bytes = [], 0
    for piece in pieces:
        made.append(piece)
        num_bytes += len(piece)
        await asyncio.sleep(0)
        if num_bytes > _MAX_MADE_BYTES:
            return _PiecesResponse(itertools.chain(made, pieces))
    return Response(b"".join(made), media_type="application/json")


class _PiecesResponse(Response):
    """Of a length that is not known. A client that leaves ends it."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__(media_type="application/json")
        del self.headers["content-length"]
        self._pieces = pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await _send_until_left(self._send_pieces(send), receive)

    async def _send_pieces(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        for piece in self._pieces:
            if piece:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send_until_left(sending: Coroutine[Any, Any, None], receive: Receive) -> None:
    """Raises what the sending raises. A client that leaves ends it."""
    task = asyncio.create_task(sending)
    leaving = asyncio.create_task(_wait_until_left(receive))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        task.cancel()  # harmless if it is done
        await asyncio.gather(task, leaving, return_exceptions=True)
    if not task.cancelled():
        task.result()


def error_response(error: ApiError, record: RequestRecord, path: str) -> Response:
    """The error object of the path's protocol, with Retry-After in whole seconds where retrying can
    help.

    record: of the request that ends so.
    """
    record.error_code = error.code.value
    status, body = shape_error(error, path, record.request_id)
    response = json_response(body, status)
    if error.retry_after_s is not None:
        response.headers["retry-after"] = str(math.ceil(error.retry_after_s))
    if error.code is ApiErrorCode.INVALID_API_KEY:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def until_disconnect(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves. Raises ApiError then.

    The body must have been read already: what is received from here on can only be the end.
    """
    task = asyncio.create_task(work)
    watcher = asyncio.create_task(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiError(ApiErrorCode.CLIENT_CLOSED_REQUEST, "the client closed the connection")
    finally:
        for pending in (task, watcher):
            pending.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def started(request: Request, work: Coroutine[Any, Any, Generation]) -> Generation:
    """As until_disconnect(). Where nobody is there any more to take it, the generation is ended."""
    made: list[Generation] = []

    async def start() -> None:
        made.append(await work)

    try:
        await until_disconnect(request, start())
    except BaseException:
        for generation in made:
            await generation.aclose()
        raise
    return made[0]


@asynccontextmanager
async def ended_by_failures(generation: Generation) -> AsyncIterator[None]:
    """Until something else ends it, come what may."""
    try:
        yield
    except BaseException as error:
        await generation.aclose(error)
        raise


async def _wait_for_disconnect(request: Request) -> None:
    await _wait_until_left(request.receive)


async def _wait_until_left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream:
    """The deltas of a generation with the first one already on its way."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._deltas = aiter(generation)
        self._first = asyncio.create_task(_next(self._deltas))
        self._failure: Exception | None = None

    async def peek(self, timeout_s: float) -> None:
        """Wait for the first delta for a while. Raises ApiError if the request failed by then."""
        await asyncio.wait({self._first}, timeout=timeout_s)
        if self._first.done():
            self._first.result()

    async def events(self, renderer: Renderer) -> AsyncGenerator[bytes, None]:
        """Server-sent events; a failure becomes an error event, after which the stream ends."""
        wants_usage = renderer.wants_usage_per_chunk
        generation = self._generation
        try:
            yield renderer.first_chunks()
            delta = await self._first
            while delta is not None:
                yield renderer.chunk(delta, generation.usage if wants_usage else None)
                delta = await anext(self._deltas, None)
            yield renderer.last_chunks(generation.usage)
        except ApiError as error:
            generation.record.error_code = error.code.value
            yield renderer.failure(error)
        except Exception as error:  # noqa: BLE001 - the process boundary: the status is sent
            _log.error("a stream failed", exc_info=error)
            self._failure = error
            bug = ApiError(ApiErrorCode.INTERNAL, "an internal error occurred")
            generation.record.error_code = bug.code.value
            yield renderer.failure(bug)

    async def aclose(self) -> None:
        """Abort what has not finished."""
        self._first.cancel()
        # Whoever asked for the first delta has had its exception; here it only has to be over.
        await asyncio.gather(self._first, return_exceptions=True)
        await self._deltas.aclose()
        await self._generation.aclose(self._failure)


async def _next(deltas: AsyncGenerator[ChoiceDelta, None]) -> ChoiceDelta | None:
    return await anext(deltas, None)


class EventStreamResponse(Response):
    """close: of what the events are of, called however the response ends, even if its first byte
    was never asked for.

    Chunks go to the server without a layer between; a client that leaves ends the stream.
    """

    def __init__(
        self, events: AsyncGenerator[bytes, None], close: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(
            media_type="text/event-stream",
            headers={"cache-control": "no-cache", "x-accel-buffering": "no"},
        )
        # Of an empty body; the stream's length is not known.
        del self.headers["content-length"]
        self._events = events
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _send_until_left(self._send_events(send), receive)
        finally:
            await self._close()

    async def _send_events(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:
            async for event in events:
                if event:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
