"""Input items as clients are shown them and the store keeps them."""

from collections.abc import Iterator, Sequence
from typing import Any

from service.api.openai.wire import encode_json
from service.api.responses.items import FunctionCallItem, FunctionCallOutputItem, Item, MessageItem

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def input_json(items: Sequence[Item], key: str) -> Iterator[bytes]:
    """A JSON array, an item a piece. key: of the response; items without an id get one of it."""
    yield b"["
    for number, item in enumerate(items):
        comma = b"," if number else b""
        yield comma + encode_json(_shown(item, f"{key}_i{number}"))
    yield b"]"


def _shown(item: Item, rest_of_id: str) -> dict[str, Any]:
    kind = item.type or "item_reference"
    shown: dict[str, Any] = {
        "id": item.id or f"{_PREFIXES[kind]}_{rest_of_id}",
        "type": kind,
        **item.model_dump(exclude_none=True, exclude={"id", "type"}),
    }
    if isinstance(item, MessageItem):
        if isinstance(item.content, str):
            is_output = item.role == "assistant"
            part = {"type": "output_text" if is_output else "input_text", "text": item.content}
            shown["content"] = [part]
        for part in shown["content"]:
            if part["type"] == "output_text":
                part["annotations"] = []
    if isinstance(item, MessageItem | FunctionCallItem | FunctionCallOutputItem):
        shown.setdefault("status", "completed")
    return shown
