"""The output of a response while it grows: items, one open at a time, and what deltas do to them.

Knows no events. JSON of a finished item is made once, in pieces, since events, the response and the
store all have it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from service.api.openai.json_parts import JsonParts
from service.api.openai.logprobs import chat_logprobs
from service.api.responses.wire import (
    FunctionCallBody,
    MessageBody,
    OutputTextBody,
    ReasoningBody,
    ReasoningTextBody,
)
from service.chat.parsed import ToolCallDelta
from service.handler.events import ChoiceDelta, TokenLogprob

IN_PROGRESS, COMPLETED, INCOMPLETE = "in_progress", "completed", "incomplete"


@dataclass(slots=True, eq=False)
class OutputItem:
    """texts: pieces of its text, or of a call's arguments. *_json: made by seal()."""

    id: str
    index: int
    status: str = IN_PROGRESS
    texts: list[str] = field(default_factory=list)
    text_json: list[bytes] = field(default_factory=list)
    item_json: list[bytes] = field(default_factory=list)

    def begun(self) -> "OutputItem":
        """The same item before it had anything."""
        return type(self)(self.id, self.index)

    def seal(self, status: str) -> Iterator[None]:
        """Makes the JSON of the finished item; others may run between two steps. May be begun
        again where it was left."""
        self.status = status
        self.text_json = []
        parts = JsonParts()
        for piece in parts.pieces(parts.text("".join(self.texts))):
            self.text_json.append(piece)
            yield
        yield from self._seal_rest()
        parts = JsonParts()
        self.item_json = list(parts.pieces(self.body(parts)))

    def _seal_rest(self) -> Iterator[None]:
        return iter(())

    def release(self) -> Iterator[None]:
        """Gives its JSON up in steps: hundreds of megabytes take long to free."""
        self.item_json.clear()
        yield from _emptied(self.text_json)

    def body(self, parts: JsonParts) -> object:
        """As it is now: its text if that was made, else nothing."""
        raise NotImplementedError

    def part(self, parts: JsonParts) -> object:
        """Its only content part, as body()."""
        raise NotImplementedError

    def text(self, parts: JsonParts) -> object:
        return parts.made(self.text_json) if self.text_json else ""


def _emptied(pieces: list[bytes]) -> Iterator[None]:
    while pieces:
        pieces.pop()
        yield


@dataclass(slots=True, eq=False)
class MessageOutput(OutputItem):
    logprobs: list[TokenLogprob] = field(default_factory=list)
    logprobs_json: list[bytes] = field(default_factory=list)

    def release(self) -> Iterator[None]:
        yield from OutputItem.release(self)
        yield from _emptied(self.logprobs_json)

    def body(self, parts: JsonParts) -> MessageBody:
        content = [self.part(parts)] if self.text_json else []
        return MessageBody(id=self.id, status=self.status, content=content)

    def part(self, parts: JsonParts) -> OutputTextBody:
        return OutputTextBody(self.text(parts), self.shown_logprobs(parts))

    def shown_logprobs(self, parts: JsonParts) -> object:
        return parts.made(self.logprobs_json) if self.logprobs_json else []

    def _seal_rest(self) -> Iterator[None]:
        self.logprobs_json = []
        parts = JsonParts()
        body = chat_logprobs(self.logprobs, parts)
        for piece in parts.pieces([] if body is None else body.content):
            self.logprobs_json.append(piece)
            yield


@dataclass(slots=True, eq=False)
class ReasoningOutput(OutputItem):
    def body(self, parts: JsonParts) -> ReasoningBody:
        content = [self.part(parts)] if self.text_json else []
        return ReasoningBody(id=self.id, status=self.status, content=content)

    def part(self, parts: JsonParts) -> ReasoningTextBody:
        return ReasoningTextBody(self.text(parts))


@dataclass(slots=True, eq=False)
class CallOutput(OutputItem):
    """call: its index among its choice's."""

    call: int = 0
    call_id: str = ""
    name: str = ""

    def begun(self) -> OutputItem:
        return CallOutput(self.id, self.index, call=self.call, call_id=self.call_id, name=self.name)

    def body(self, parts: JsonParts) -> FunctionCallBody:
        return FunctionCallBody(
            id=self.id,
            status=self.status,
            call_id=self.call_id,
            name=self.name,
            arguments=self.text(parts),
        )


class Grown(NamedTuple):
    """item has more text, or has begun. closed: the one that was open before, which is over now.
    logprobs: of the text."""

    item: OutputItem
    piece: str
    closed: OutputItem | None
    is_new: bool
    logprobs: list[TokenLogprob]


class Output:
    """push() deltas of the only choice in order, then finish(), and seal the open item.

    key: of the response; its items' ids have it. Whoever iterates seals what is closed.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self.items: list[OutputItem] = []
        self.finish_reason: str | None = None
        self.num_reasoning_tokens = 0
        self._num_tokens = 0
        self._logprobs: list[TokenLogprob] = []

    @property
    def open_item(self) -> OutputItem | None:
        last = self.items[-1] if self.items else None
        return last if last is not None and last.status == IN_PROGRESS else None

    def push(self, delta: ChoiceDelta) -> Iterator[Grown]:
        """What is left of a call that has begun comes before the text behind it."""
        num_thought = self._count(delta)
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason
        if delta.reasoning:
            yield self._grow_by(ReasoningOutput, "rs", delta.reasoning)
        calls = delta.tool_calls
        if calls and self._is_open(calls[0]):
            yield self._grow_call(calls[0])
            calls = calls[1:]
        self._take_logprobs(delta, num_thought)
        if delta.text:
            yield self._grow_message(delta.text)
        for call in calls:
            yield self._grow_call(call)

    def finish(self) -> Iterator[Grown]:
        """A response has a message at least, or a call. Log probabilities of what was not shown
        go with the text before."""
        if all(isinstance(item, ReasoningOutput) for item in self.items):
            yield self._grow_message("")
        elif isinstance(self.open_item, MessageOutput):
            self.open_item.logprobs += self._logprobs

    def _count(self, delta: ChoiceDelta) -> int:
        """How many of the delta's tokens are thinking. Where outputs came together that are not
        all of it, that goes by their characters."""
        before, self._num_tokens = self._num_tokens, delta.num_output_tokens
        if not delta.reasoning:
            return 0
        num_chars = len(delta.reasoning) + len(delta.text)
        num_chars += sum(len(call.arguments) for call in delta.tool_calls)
        share = round((self._num_tokens - before) * len(delta.reasoning) / num_chars)
        self.num_reasoning_tokens = before + share
        return share

    def _take_logprobs(self, delta: ChoiceDelta, num_thought: int) -> None:
        """Those of thinking, of calls and of their marks are not kept."""
        if delta.logprobs:
            self._logprobs += delta.logprobs[num_thought:]
        is_open_elsewhere = not isinstance(self.open_item, MessageOutput | None)
        if not delta.text and (delta.tool_calls or is_open_elsewhere):
            self._logprobs = []

    def _grow_message(self, text: str) -> Grown:
        grown = self._grow_by(MessageOutput, "msg", text)
        logprobs, self._logprobs = self._logprobs, []
        if isinstance(grown.item, MessageOutput):
            grown.item.logprobs += logprobs
        return grown._replace(logprobs=logprobs)

    def _is_open(self, call: ToolCallDelta) -> bool:
        item = self.open_item
        return isinstance(item, CallOutput) and item.call == call.index

    def _grow_call(self, call: ToolCallDelta) -> Grown:
        if self._is_open(call):
            return self._add(self.items[-1], call.arguments, None, is_new=False)
        closed, item_id = self.open_item, self._id("fc")
        item = CallOutput(
            item_id, len(self.items), call=call.index, call_id=call.id, name=call.name
        )
        self.items.append(item)
        return self._add(item, call.arguments, closed, is_new=True)

    def _grow_by(self, kind: type[OutputItem], prefix: str, text: str) -> Grown:
        opened = self.open_item
        if opened is not None and type(opened) is kind:
            return self._add(opened, text, None, is_new=False)
        item = kind(self._id(prefix), len(self.items))
        self.items.append(item)
        return self._add(item, text, opened, is_new=True)

    def _add(
        self, item: OutputItem, piece: str, closed: OutputItem | None, *, is_new: bool
    ) -> Grown:
        item.texts.append(piece)
        return Grown(item, piece, closed, is_new, [])

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._key}_{len(self.items)}"
