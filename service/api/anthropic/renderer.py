"""Renders one generation as the body or the events of /v1/messages."""

from collections.abc import Iterator, Sequence

from service.api.anthropic.block_stream import BlockStream
from service.api.anthropic.errors import anthropic_error
from service.api.anthropic.requests import MessagesRequest
from service.api.anthropic.stops import Stop, stop_of
from service.api.anthropic.wire import (
    UNSIGNED,
    Content,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    StopDelta,
    TextContent,
    ThinkingContent,
    ToolUseContent,
    message_usage,
    named_event,
    sse_event,
)
from service.api.call_arguments import object_part
from service.api.openai.json_parts import JsonParts
from service.api.openai.wire import encode_json
from service.errors import ApiError
from service.handler.collect import ChoiceResult
from service.handler.events import ChoiceDelta, Usage
from service.handler.generation import GenerationInfo


class MessageRenderer:
    """Implements Renderer."""

    wants_usage_per_chunk = False

    def __init__(self, request: MessagesRequest, info: GenerationInfo) -> None:
        self._info = info
        self._max_tokens = request.max_tokens
        self._blocks = BlockStream()
        self._last = ChoiceDelta(0)

    def first_chunks(self) -> bytes:
        """What was cached is known with the first token: until then all is input."""
        usage = MessageUsage(len(self._info.prompts[0]), 0, 0)
        start = MessageStart(self._message([], None, usage))
        return sse_event(start) + sse_event(Ping())

    def chunk(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        self._last = delta
        return b"".join(map(sse_event, self._blocks.push(delta)))

    def last_chunks(self, usage: Usage) -> bytes:
        stop = self._stop(self._last, usage)
        events = [
            *self._blocks.close(),
            MessageDelta(StopDelta(stop.reason, stop.sequence), message_usage(usage)),
            MessageStop(),
        ]
        return b"".join(map(sse_event, events))

    def failure(self, error: ApiError) -> bytes:
        body = anthropic_error(error, self._info.request_id)
        return named_event("error", encode_json(body))

    def body(self, results: Sequence[ChoiceResult], usage: Usage) -> Iterator[bytes]:
        (result,) = results
        parts = JsonParts()
        stop = self._stop(result, usage)
        message = self._message(_content(result, parts), stop, message_usage(usage))
        return parts.pieces(message)

    def _stop(self, end: ChoiceDelta | ChoiceResult, usage: Usage) -> Stop:
        num_tokens = usage.num_output_tokens
        return stop_of(end.finish_reason, end.stop_reason, num_tokens, self._max_tokens)

    def _message(self, content: list[Content], stop: Stop | None, usage: MessageUsage) -> Message:
        return Message(
            id=f"msg_{self._info.request_id}",
            model=self._info.model,
            content=content,
            stop_reason=None if stop is None else stop.reason,
            stop_sequence=None if stop is None else stop.sequence,
            usage=usage,
        )


def _content(result: ChoiceResult, parts: JsonParts) -> list[Content]:
    """Thinking, text, calls: what is empty is left out."""
    content: list[Content] = []
    if result.reasoning_parts:
        content.append(ThinkingContent(parts.text(result.reasoning), UNSIGNED))
    text = result.text
    if text:
        content.append(TextContent(parts.text(text)))
    for call in result.tool_calls:
        content.append(ToolUseContent(call.id, call.name, object_part(call.arguments, parts)))
    return content
