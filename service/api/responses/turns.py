"""Items as chat templates read them: messages, in the order of the items.

What comes one after another of an assistant, thinking, text and calls, is one message.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from service.api.chat_prompts import assistant_message, check_num_parts
from service.api.openai.tools import arguments_of
from service.api.responses.items import (
    FunctionCallItem,
    FunctionCallOutputItem,
    ImagePart,
    Item,
    MessageItem,
    ReasoningItem,
    joined,
)
from service.errors import ApiError, ApiErrorCode
from service.handler.checks import check_num_messages
from service.images.files import ImageFile
from service.limits import Limits


def to_template_messages(
    instructions: str | None, items: Sequence[Item], limits: Limits
) -> list[dict[str, Any]]:
    """Raises ApiError if there are too many items, or a message has too many parts, or a call is
    not answered by its id."""
    check_num_messages(len(items), limits)
    _check_results(items)
    shown: list[dict[str, Any]] = []
    if instructions is not None:
        shown.append({"role": "system", "content": instructions})
    for is_assistant, group in groupby(items, _is_assistants):
        if is_assistant:
            shown.append(_assistant_message(list(group), limits))
        else:
            shown.extend(_other_message(item, limits) for item in group)
    return shown


def images_in(items: Sequence[Item]) -> list[ImageFile]:
    """Of all items, in order. Raises ApiError."""
    return [
        image.to_file() for item in items if isinstance(item, MessageItem) for image in item.images
    ]


def _check_results(items: Sequence[Item]) -> None:
    called = {item.call_id for item in items if isinstance(item, FunctionCallItem)}
    for item in items:
        if isinstance(item, FunctionCallOutputItem) and item.call_id not in called:
            message = f"there is no call of the id {item.call_id[:64]!r} that this is the result of"
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "input.call_id")


def _is_assistants(item: Item) -> bool:
    if isinstance(item, MessageItem):
        return item.role == "assistant"
    return isinstance(item, FunctionCallItem | ReasoningItem)


def _assistant_message(items: Sequence[Item], limits: Limits) -> dict[str, Any]:
    texts = [_content(item, limits) for item in items if isinstance(item, MessageItem)]
    thoughts = [
        joined(item.content or item.summary) for item in items if isinstance(item, ReasoningItem)
    ]
    calls = [_call(item) for item in items if isinstance(item, FunctionCallItem)]
    return assistant_message(texts, thoughts, calls)


def _call(item: FunctionCallItem) -> dict[str, Any]:
    arguments = arguments_of(item.arguments, "input.arguments")
    function = {"name": item.name, "arguments": arguments}
    return {"id": item.call_id, "type": "function", "function": function}


def _other_message(item: Item, limits: Limits) -> dict[str, Any]:
    match item:
        case MessageItem():
            role = "system" if item.role == "developer" else item.role
            return {"role": role, "content": _content(item, limits)}
        case FunctionCallOutputItem():
            check_num_parts(item.output, limits)
            text = item.output if isinstance(item.output, str) else joined(item.output)
            return {"role": "tool", "content": text, "tool_call_id": item.call_id}
        case _:
            raise ValueError(f"an item of type {item.type} is no message")


def _content(item: MessageItem, limits: Limits) -> Any:
    """A text, or parts where images stand among them."""
    check_num_parts(item.content, limits)
    if isinstance(item.content, str):
        return item.content
    texts = [part for part in item.content if not isinstance(part, ImagePart)]
    if len(texts) == len(item.content):
        return joined(texts)
    return [
        {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}
        for part in item.content
    ]
