"""Messages and deltas of chats as OpenAI's clients read them."""

from msgspec import UNSET

from service.api.openai.json_parts import JsonParts
from service.api.openai.wire import (
    ChatDelta,
    ChatMessageBody,
    FunctionBody,
    FunctionChunk,
    ToolCallBody,
    ToolCallChunk,
)
from service.chat.parsed import ToolCallDelta
from service.handler.collect import ChoiceResult
from service.handler.events import ChoiceDelta


def chat_delta(delta: ChoiceDelta) -> ChatDelta:
    """What a chunk adds to the message; fields that add nothing are left out."""
    if not (delta.reasoning or delta.tool_calls):
        return ChatDelta(content=delta.text) if delta.text else ChatDelta()
    reasoning = delta.reasoning or UNSET
    return ChatDelta(
        content=delta.text or UNSET,
        reasoning_content=reasoning,
        reasoning=reasoning,
        tool_calls=[_chunk(call) for call in delta.tool_calls] or UNSET,
    )


def chat_message(result: ChoiceResult, parts: JsonParts) -> ChatMessageBody:
    """The whole message; reasoning stands there under both of its names."""
    if not (result.reasoning_parts or result.tool_calls):
        return ChatMessageBody(parts.text(result.text))
    has_reasoning = bool(result.reasoning_parts)
    is_silent = not result.text and bool(result.tool_calls)
    calls = [
        ToolCallBody(call.id, FunctionBody(call.name, parts.text(call.arguments)))
        for call in result.tool_calls
    ]
    return ChatMessageBody(
        None if is_silent else parts.text(result.text),
        reasoning_content=parts.text(result.reasoning) if has_reasoning else UNSET,
        reasoning=parts.text(result.reasoning) if has_reasoning else UNSET,
        tool_calls=calls or UNSET,
    )


def _chunk(call: ToolCallDelta) -> ToolCallChunk:
    if not call.name:
        return ToolCallChunk(call.index, FunctionChunk(call.arguments))
    return ToolCallChunk(
        call.index, FunctionChunk(call.arguments, call.name), id=call.id, type="function"
    )
