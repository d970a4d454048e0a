"""EventWriter: what an output grows by as server-sent events, numbered from 0."""

from collections.abc import Iterator

from service.api.openai.json_parts import JsonParts
from service.api.openai.logprobs import chat_logprobs
from service.api.responses.draft import CANCELLED, FAILED
from service.api.responses.output import (
    COMPLETED,
    INCOMPLETE,
    CallOutput,
    Grown,
    MessageOutput,
    OutputItem,
)
from service.api.responses.wire import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ErrorEvent,
    Event,
    ItemEvent,
    PartEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    ResponseEvent,
    ResponseHead,
    TextDeltaEvent,
    TextDoneEvent,
    sse_head,
)
from service.errors import ApiError, ApiErrorCode

EVENT_OF_STATUS = {
    COMPLETED: "response.completed",
    INCOMPLETE: "response.incomplete",
    CANCELLED: "response.incomplete",
    FAILED: "response.failed",
}


class EventWriter:
    """Of one stream, in which each event has the next number. Events come in pieces; all but those
    of long texts are one piece. after: they are not written up to this number."""

    def __init__(self, after: int = -1) -> None:
        self._num_events = 0
        self._after = after

    def event(self, event: Event, parts: JsonParts) -> Iterator[bytes]:
        event.sequence_number = self._num_events
        self._num_events += 1
        if event.sequence_number <= self._after:
            return
        pieces = parts.pieces(event)
        yield sse_head(event) + next(pieces)
        yield from pieces
        yield b"\n\n"

    def error(self, error: ApiError) -> bytes:
        event = ErrorEvent(
            type="error", code=error.code.value, message=error.message, param=error.param
        )
        return b"".join(self.event(event, JsonParts()))

    def of_response(self, kind: str, whole: list[bytes]) -> Iterator[bytes]:
        """whole: the response's JSON."""
        parts = JsonParts()
        return self.event(ResponseEvent(type=kind, response=parts.made(whole)), parts)

    def begun(self, whole: list[bytes]) -> Iterator[bytes]:
        """The first events. whole: without output."""
        for kind in ("response.created", "response.in_progress"):
            yield from self.of_response(kind, whole)

    def grown(self, grown: Grown) -> Iterator[bytes]:
        """What was closed has to be sealed before."""
        if grown.closed is not None:
            yield from self.closed(grown.closed)
        if grown.is_new:
            yield from self._opened(grown.item)
        if grown.piece:
            yield from self._delta(grown)

    def closed(self, item: OutputItem) -> Iterator[bytes]:
        """The last events of a sealed item."""
        parts = JsonParts()
        yield from self.event(_done(item, parts), parts)
        if not isinstance(item, CallOutput):
            yield from self._part("done", item)
        yield from self._item("done", item)

    def _opened(self, item: OutputItem) -> Iterator[bytes]:
        yield from self._item("added", item)
        if not isinstance(item, CallOutput):
            yield from self._part("added", item)

    def _item(self, what: str, item: OutputItem) -> Iterator[bytes]:
        parts = JsonParts()
        shown = parts.made(item.item_json) if item.item_json else item.body(parts)
        event = ItemEvent(type=f"response.output_item.{what}", output_index=item.index, item=shown)
        yield from self.event(event, parts)

    def _part(self, what: str, item: OutputItem) -> Iterator[bytes]:
        parts = JsonParts()
        event = PartEvent(
            type=f"response.content_part.{what}",
            item_id=item.id,
            output_index=item.index,
            part=item.part(parts),
        )
        yield from self.event(event, parts)

    def _delta(self, grown: Grown) -> Iterator[bytes]:
        """grown: with a piece."""
        parts = JsonParts()
        item, delta = grown.item, parts.text(grown.piece)
        event: Event
        match item:
            case MessageOutput():
                body = chat_logprobs(grown.logprobs, parts)
                event = TextDeltaEvent(
                    type="response.output_text.delta",
                    item_id=item.id,
                    output_index=item.index,
                    delta=delta,
                    logprobs=[] if body is None else body.content,
                )
            case CallOutput():
                kind = "response.function_call_arguments.delta"
                event = ArgumentsDeltaEvent(
                    type=kind, item_id=item.id, output_index=item.index, delta=delta
                )
            case _:
                kind = "response.reasoning_text.delta"
                event = ReasoningDeltaEvent(
                    type=kind, item_id=item.id, output_index=item.index, delta=delta
                )
        yield from self.event(event, parts)


class ResumableEventWriter(EventWriter):
    """A delta has the number of its last character, each of which counts as one: so numbers do not
    depend on where a text was cut, and a stream goes on within a text."""

    def pass_over(self) -> None:
        """What comes is written, whatever number it would have had."""
        self._num_events = max(self._num_events, self._after + 1)

    def ended(self, head: ResponseHead, whole: list[bytes]) -> Iterator[bytes]:
        """The last events. That it has failed is always told: the output that was seen may be gone
        with its process, or be too large to be kept."""
        if head.error is not None:
            self.pass_over()
            yield self.error(ApiError(ApiErrorCode(head.error.type), head.error.message))
        yield from self.of_response(EVENT_OF_STATUS[head.status], whole)

    def _delta(self, grown: Grown) -> Iterator[bytes]:
        start = self._num_events
        self._num_events += len(grown.piece) - 1
        unseen = grown.piece[max(0, self._after + 1 - start) :]
        return super()._delta(grown._replace(piece=unseen))


def _done(item: OutputItem, parts: JsonParts) -> Event:
    text = item.text(parts)
    match item:
        case MessageOutput():
            return TextDoneEvent(
                type="response.output_text.done",
                item_id=item.id,
                output_index=item.index,
                text=text,
                logprobs=item.shown_logprobs(parts),
            )
        case CallOutput():
            return ArgumentsDoneEvent(
                type="response.function_call_arguments.done",
                item_id=item.id,
                output_index=item.index,
                arguments=text,
            )
        case _:
            return ReasoningDoneEvent(
                type="response.reasoning_text.done",
                item_id=item.id,
                output_index=item.index,
                text=text,
            )
