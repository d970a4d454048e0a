"""Responses of the background that are under way in this process, and streams that follow them."""

import asyncio
from collections.abc import AsyncGenerator, Iterator

from service.api.responses.draft import Draft
from service.api.responses.events import ResumableEventWriter
from service.api.responses.keeping import Ending, Keeping, begun_json
from service.api.responses.output import Grown
from service.api.responses.stream import in_turns
from service.errors import ApiError, ApiErrorCode
from service.response_store.records import ResponseName


class LiveResponse:
    """One that grows. keeping: of a response that has begun. whole: its JSON, once it has ended."""

    def __init__(self, keeping: Keeping) -> None:
        self.draft: Draft = keeping.draft
        self.begun = begun_json(keeping.draft)
        self.items = keeping.output.items
        self.whole: list[bytes] = []
        self.is_over = False
        self.changed = asyncio.Event()
        self._keeping = keeping

    def tell(self) -> None:
        """Whoever waits for what `changed` was until now: there is more."""
        told, self.changed = self.changed, asyncio.Event()
        told.set()

    async def end(self, ending: Ending) -> None:
        self.whole = await self._keeping.end(ending)

    def close(self) -> None:
        """Nothing comes any more, whether it could be ended or not."""
        self.is_over = True
        self.tell()


LiveResponses = dict[ResponseName, LiveResponse]


class FollowedStream:
    """after: the number of the last event that is not wanted any more. Events and numbers are those
    of ReplayedStream, but for where texts are cut. It keeps nothing of what it follows: who reads
    slowly gets longer deltas."""

    def __init__(self, live: LiveResponse, after: int = -1) -> None:
        self._live = live
        self._writer = ResumableEventWriter(after)
        # Of the item that is written, and of its texts.
        self._num_closed = self._num_texts = 0
        self._is_open = False

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Until the response has ended. A failure becomes an event."""
        live, writer = self._live, self._writer
        async for piece in in_turns(writer.begun(live.begun)):
            yield piece
        is_over = False
        while not is_over:
            is_over, changed = live.is_over, live.changed
            async for piece in in_turns(self._grown()):
                yield piece
            if not is_over:
                await changed.wait()
        if not live.whole:
            writer.pass_over()
            yield writer.error(ApiError(ApiErrorCode.INTERNAL, "an internal error occurred"))
            return
        async for piece in in_turns(writer.ended(live.draft.head, live.whole)):
            yield piece

    def _grown(self) -> Iterator[bytes]:
        """What there is more of. What is sealed has all of its texts, so that is asked first."""
        items = self._live.items
        while self._num_closed < len(items):
            item = items[self._num_closed]
            is_sealed, num_texts = bool(item.item_json), len(item.texts)
            text = "".join(item.texts[self._num_texts : num_texts])
            grown = Grown(item.begun(), text, None, is_new=not self._is_open, logprobs=[])
            self._is_open, self._num_texts = True, num_texts
            yield from self._writer.grown(grown)
            if not is_sealed:
                return
            yield from self._writer.closed(item)
            self._num_closed += 1
            self._is_open, self._num_texts = False, 0
