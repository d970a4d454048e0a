"""ResponseStream: a response under way as server-sent events, until it ends or is stopped."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator

from service.api.http_replies import EventStream
from service.api.responses.draft import FAILED
from service.api.responses.events import EVENT_OF_STATUS, EventWriter
from service.api.responses.keeping import Ending, Keeping, begun_json
from service.api.responses.output import COMPLETED, INCOMPLETE, Grown, OutputItem
from service.errors import ApiError, ApiErrorCode
from service.handler.events import ChoiceDelta
from service.handler.generation import Generation
from service.response_store.runs import Run

_MIN_PIECE_BYTES = 64 << 10
_log = logging.getLogger(__name__)


class ResponseStream(EventStream):
    def __init__(self, generation: Generation, keeping: Keeping) -> None:
        super().__init__(generation)
        self._keeping = keeping
        # None until others can see it.
        self._run: Run | None = None
        self._writer = EventWriter()
        self._output, self._draft = keeping.output, keeping.draft
        self._is_over = False

    async def response_events(self) -> AsyncGenerator[bytes, None]:
        """A failure becomes two events, an error and a response that has failed."""
        generation = self._generation
        run = self._run = await self._keeping.begin()
        try:
            await self._keeping.until_begun()
            async for piece in in_turns(self._writer.begun(begun_json(self._draft))):
                yield piece
            delta = await run.wait_for(self._first_delta)
            while delta is not None:
                async for piece in in_turns(self._pushed(delta)):
                    yield piece
                delta = await run.wait_for(self._next_delta)
            ending = self._keeping.ending(generation.usage, is_cancelled=run.is_cancelled)
        except ApiError as error:
            ending = self._failed(error)
        except Exception as error:  # noqa: BLE001 - the process boundary: the status is sent
            _log.error("a stream failed", exc_info=error)
            self._failure = error
            bug = ApiError(ApiErrorCode.INTERNAL, "an internal error occurred")
            ending = self._failed(bug)
        async for piece in self._end(ending):
            yield piece

    async def aclose(self) -> None:
        """Abort what has not finished; the store is told that it was stopped."""
        await super().aclose()
        if self._run is not None and not self._is_over:
            self._is_over = True
            ending = self._keeping.ending(self._generation.usage, is_cancelled=True)
            await self._keeping.end(ending)
        for item in self._output.items:
            for _ in item.release():
                await asyncio.sleep(0)

    async def _first_delta(self) -> ChoiceDelta | None:
        return await self._first

    async def _next_delta(self) -> ChoiceDelta | None:
        return await anext(self._deltas, None)

    def _failed(self, error: ApiError) -> Ending:
        self._generation.record.error_code = error.code.value
        return Ending(FAILED, self._generation.usage, error)

    async def _end(self, ending: Ending) -> AsyncGenerator[bytes, None]:
        async for piece in in_turns(self._closed(ending)):
            yield piece
        whole = await self._keeping.end(ending)
        self._is_over = True
        if ending.failure is not None:
            yield self._writer.error(ending.failure)
        last = self._writer.of_response(EVENT_OF_STATUS[ending.status], whole)
        async for piece in in_turns(last):
            yield piece

    def _pushed(self, delta: ChoiceDelta) -> Iterator[bytes]:
        for grown in self._output.push(delta):
            yield from self._grown(grown)

    def _grown(self, grown: Grown) -> Iterator[bytes]:
        if grown.closed is not None:
            yield from _sealing(grown.closed, COMPLETED)
        yield from self._writer.grown(grown)

    def _closed(self, ending: Ending) -> Iterator[bytes]:
        """What ends the last item."""
        if ending.status in (COMPLETED, INCOMPLETE):
            for grown in self._output.finish():
                yield from self._grown(grown)
        item = self._output.open_item
        if item is not None:
            yield from _sealing(item, COMPLETED if ending.status == COMPLETED else INCOMPLETE)
            yield from self._writer.closed(item)


def _sealing(item: OutputItem, status: str) -> Iterator[bytes]:
    for _ in item.seal(status):
        yield b""


async def in_turns(pieces: Iterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Small pieces joined; others run after each that is not."""
    joined: list[bytes] = []
    num_bytes = 0
    for piece in pieces:
        joined.append(piece)
        num_bytes += len(piece)
        if num_bytes >= _MIN_PIECE_BYTES:
            yield b"".join(joined)
            joined, num_bytes = [], 0
        if not piece or not joined:
            await asyncio.sleep(0)
    if joined:
        yield b"".join(joined)
