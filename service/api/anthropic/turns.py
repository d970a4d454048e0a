"""Messages of Anthropic's API, and as chat templates read them.

Turns of one role after another are one turn, as Anthropic has it. Results of tools become messages
of their own, in their order among what a user says.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from service.api.anthropic.blocks import (
    Block,
    Blocks,
    ImageBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    joined,
    refuse_other_kinds,
)
from service.api.chat_prompts import assistant_message, check_arguments, check_num_parts
from service.api.openai.parameters import StrictModel
from service.errors import ApiError, ApiErrorCode
from service.handler.checks import check_num_messages
from service.images.files import ImageFile
from service.limits import MAX_ITEMS, Limits

_ROLE_OF_BLOCK = {
    "image": "user",
    "thinking": "assistant",
    "tool_use": "assistant",
    "tool_result": "user",
}


class InputMessage(StrictModel):
    """content: a text is short for one text block."""

    role: Literal["user", "assistant", "system"]
    content: Blocks | str

    @model_validator(mode="before")
    @classmethod
    def _refuse_other_kinds(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            refuse_other_kinds(data.get("content"))
        return data

    @model_validator(mode="after")
    def _blocks_have_their_roles(self) -> Self:
        for block in self.content if isinstance(self.content, list) else ():
            role = _ROLE_OF_BLOCK.get(block.type, self.role)
            if role != self.role:
                message = f"blocks of type {block.type} are for messages of role {role}"
                raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "messages.content")
        return self


def _check_inputs(messages: list[InputMessage]) -> list[InputMessage]:
    """Here and not later, so that those of large bodies are measured where these are parsed."""
    contents = [message.content for message in messages if isinstance(message.content, list)]
    calls = [block for blocks in contents for block in blocks if isinstance(block, ToolUseBlock)]
    check_arguments([call.input for call in calls], "messages.content.input")
    return messages


InputMessages = Annotated[
    list[InputMessage], Field(max_length=MAX_ITEMS, fail_fast=True), AfterValidator(_check_inputs)
]


def to_template_messages(
    system: str | list[TextBlock] | None, messages: Sequence[InputMessage], limits: Limits
) -> list[dict[str, Any]]:
    """Raises ApiError if there are too many messages, or a message has too many blocks."""
    check_num_messages(len(messages), limits)
    for content in (system, *(message.content for message in messages)):
        check_num_parts(content, limits)
    shown: list[dict[str, Any]] = []
    if system is not None:
        text = system if isinstance(system, str) else joined(system)
        shown.append({"role": "system", "content": text})
    for role, turns in groupby(messages, lambda message: message.role):
        items = [item for turn in turns for item in _items(turn.content)]
        if role == "assistant":
            shown.append(_assistant_message(items))
        else:
            shown.extend(_other_messages(role, items))
    return shown


def images_in(messages: Sequence[InputMessage]) -> list[ImageFile]:
    """Of all messages, in order. Raises ApiError."""
    return [
        block.source.to_file()
        for message in messages
        if isinstance(message.content, list)
        for block in message.content
        if isinstance(block, ImageBlock)
    ]


def _items(content: str | list[Block]) -> Sequence[str | Block]:
    """A text block is its text."""
    if isinstance(content, str):
        return (content,)
    return [block.text if isinstance(block, TextBlock) else block for block in content]


def _assistant_message(items: Sequence[str | Block]) -> dict[str, Any]:
    texts = [item for item in items if isinstance(item, str)]
    thoughts = [item.thinking for item in items if isinstance(item, ThinkingBlock)]
    calls = [_call(item) for item in items if isinstance(item, ToolUseBlock)]
    return assistant_message(texts, thoughts, calls)


def _call(block: ToolUseBlock) -> dict[str, Any]:
    function = {"name": block.name, "arguments": block.input}
    return {"id": block.id, "type": "function", "function": function}


def _other_messages(role: str, items: Sequence[str | Block]) -> Iterator[dict[str, Any]]:
    said: list[str | ImageBlock] = []
    for item in items:
        if isinstance(item, ToolResultBlock):
            if said:
                yield {"role": role, "content": _content(said)}
                said = []
            yield {"role": "tool", "content": item.text, "tool_call_id": item.tool_use_id}
        elif isinstance(item, str | ImageBlock):
            said.append(item)
    if said:
        yield {"role": role, "content": _content(said)}


def _content(said: Sequence[str | ImageBlock]) -> str | list[dict[str, Any]]:
    texts = [item for item in said if isinstance(item, str)]
    if len(texts) == len(said):
        return "\n".join(texts)
    return [
        {"type": "text", "text": item} if isinstance(item, str) else {"type": "image"}
        for item in said
    ]
