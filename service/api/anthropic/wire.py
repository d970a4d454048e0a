"""Messages and stream events as Anthropic's clients read them, encoded by msgspec. Pure data."""

from typing import Any

from msgspec import Struct

from service.api.openai.wire import encode_json
from service.handler.events import Usage

UNSIGNED = "unsigned"
"""Where Anthropic has the signature of a thinking block; clients drop blocks that have none."""


class TextContent(Struct, frozen=True, tag="text", tag_field="type"):
    text: str


class ThinkingContent(Struct, frozen=True, tag="thinking", tag_field="type"):
    thinking: str
    signature: str


class ToolUseContent(Struct, frozen=True, tag="tool_use", tag_field="type"):
    id: str
    name: str
    input: dict[str, Any]


Content = TextContent | ThinkingContent | ToolUseContent


class MessageUsage(Struct, frozen=True):
    """The prompt's tokens are input_tokens and cache_read_input_tokens together."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int
    cache_creation_input_tokens: int = 0


class Message(Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    id: str
    role: str = "assistant"
    model: str
    content: list[Content]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage


class TokenCount(Struct, frozen=True):
    input_tokens: int


class TextDelta(Struct, frozen=True, tag="text_delta", tag_field="type"):
    text: str


class ThinkingDelta(Struct, frozen=True, tag="thinking_delta", tag_field="type"):
    thinking: str


class SignatureDelta(Struct, frozen=True, tag="signature_delta", tag_field="type"):
    signature: str


class InputJsonDelta(Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    partial_json: str


Delta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(Struct, frozen=True, tag="message_start", tag_field="type"):
    message: Message


class Ping(Struct, frozen=True, tag="ping", tag_field="type"): ...


class BlockStart(Struct, frozen=True, tag="content_block_start", tag_field="type"):
    index: int
    content_block: Content


class BlockDelta(Struct, frozen=True, tag="content_block_delta", tag_field="type"):
    index: int
    delta: Delta


class BlockStop(Struct, frozen=True, tag="content_block_stop", tag_field="type"):
    index: int


class StopDelta(Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(Struct, frozen=True, tag="message_delta", tag_field="type"):
    delta: StopDelta
    usage: MessageUsage


class MessageStop(Struct, frozen=True, tag="message_stop", tag_field="type"): ...


Event = MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop


def sse_event(event: Event) -> bytes:
    """A server-sent event under the name of its type."""
    name = str(event.__struct_config__.tag)
    return named_event(name, encode_json(event))


def named_event(name: str, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


def message_usage(usage: Usage) -> MessageUsage:
    return MessageUsage(
        usage.num_prompt_tokens - usage.num_cached_tokens,
        usage.num_output_tokens,
        usage.num_cached_tokens,
    )
