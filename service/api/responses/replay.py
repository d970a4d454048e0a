"""The stream of a stored response, made of what is stored: every call gives the same events under
the same numbers, whichever ingress it comes to, so that a client goes on where it was.

A text is one delta, or what is wanted of it, whose log probabilities come when it is done.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator

import msgspec
from msgspec import Raw, Struct

from service.api.openai.wire import encode_json
from service.api.responses.conversation import not_found
from service.api.responses.draft import FAILED, failure_body, with_output
from service.api.responses.events import ResumableEventWriter
from service.api.responses.output import (
    IN_PROGRESS,
    CallOutput,
    Grown,
    MessageOutput,
    OutputItem,
    ReasoningOutput,
)
from service.api.responses.stream import in_turns
from service.api.responses.wire import ResponseHead
from service.errors import ApiError, ApiErrorCode
from service.response_store.records import ResponseName, State, StoredResponse
from service.response_store.store import ResponseStore

_FIRST_WAIT_S, _LONGEST_WAIT_S, _WAIT_GROWTH = 0.1, 2.0, 1.5


class _KeptHead(ResponseHead, kw_only=True):
    """What may be long stays JSON."""

    instructions: Raw = Raw(b"null")
    tools: Raw = Raw(b"[]")


class _Part(Struct):
    """What is made already stays as it is."""

    text: Raw
    logprobs: Raw = Raw(b"[]")


class _StoredItem(Struct):
    type: str
    id: str
    status: str
    content: list[_Part] = []
    call_id: str = ""
    name: str = ""
    arguments: Raw = Raw(b'""')


class ReplayedStream:
    """after: the number of the last event that is not wanted any more."""

    def __init__(
        self, store: ResponseStore, name: ResponseName, stored: StoredResponse, after: int
    ) -> None:
        self._store = store
        self._name = name
        self._stored = stored
        self._writer = ResumableEventWriter(after)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Where it has not ended, the rest comes as soon as it has. A failure becomes an event."""
        async for piece in in_turns(self._begun()):
            yield piece
        try:
            await self._wait_until_ended()
        except ApiError as error:
            self._writer.pass_over()
            yield self._writer.error(error)
            return
        async for piece in in_turns(self._ended()):
            yield piece

    async def _wait_until_ended(self) -> None:
        """Asks again and again: calls that wait would be taken from those that store."""
        wait_s = _FIRST_WAIT_S
        while self._stored.state in (State.RUNNING, State.CANCELLING):
            await asyncio.sleep(wait_s)
            wait_s = min(_WAIT_GROWTH * wait_s, _LONGEST_WAIT_S)
            stored = await self._store.get(self._name)
            if stored is None:
                raise not_found(self._name.response_id, "response_id")
            self._stored = stored

    def _begun(self) -> Iterator[bytes]:
        """Empty pieces let others run; see in_turns()."""
        begun = shown_head(self._stored)
        yield b""
        begun.status = IN_PROGRESS
        begun.completed_at = begun.error = begun.incomplete_details = begun.usage = None
        begun_json = encode_json(begun)
        yield b""
        yield from self._writer.begun(with_output([begun_json], [b"[]"]))

    def _ended(self) -> Iterator[bytes]:
        """As _begun()."""
        items = msgspec.json.decode(self._stored.output, type=list[Raw])
        yield b""
        for index, item_json in enumerate(items):
            yield from self._item(index, bytes(item_json))
        head = shown_head(self._stored)
        yield b""
        head_json = encode_json(head)
        yield b""
        yield from self._writer.ended(head, with_output([head_json], [self._stored.output]))

    def _item(self, index: int, item_json: bytes) -> Iterator[bytes]:
        stored = msgspec.json.decode(item_json, type=_StoredItem)
        yield b""
        item = _opened(index, stored)
        text_json = stored.arguments if isinstance(item, CallOutput) else stored.content[0].text
        text = msgspec.json.decode(text_json, type=str)
        yield b""
        yield from self._writer.grown(Grown(item, text, None, is_new=True, logprobs=[]))
        item.status, item.text_json, item.item_json = stored.status, [bytes(text_json)], [item_json]
        if isinstance(item, MessageOutput):
            item.logprobs_json = [bytes(stored.content[0].logprobs)]
        yield from self._writer.closed(item)


def shown_head(stored: StoredResponse) -> ResponseHead:
    """Of a response whose process is gone: that it has failed."""
    head = msgspec.json.decode(stored.head, type=_KeptHead)
    if stored.state is State.LOST:
        lost = ApiError(ApiErrorCode.REPLICA_LOST, "the process that made this response is gone")
        head.status, head.error = FAILED, failure_body(lost)
    return head


def _opened(index: int, stored: _StoredItem) -> OutputItem:
    match stored.type:
        case "message":
            return MessageOutput(stored.id, index)
        case "reasoning":
            return ReasoningOutput(stored.id, index)
        case _:
            return CallOutput(stored.id, index, call_id=stored.call_id, name=stored.name)
