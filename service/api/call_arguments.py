"""Arguments of a call, a JSON text, where a protocol has them as an object."""

from typing import Any

import msgspec
from pydantic_core import from_json

from service.api.openai.json_parts import MAX_CHARS, JsonParts

_SPACE = " \t\r\n"


def object_part(arguments: str, parts: JsonParts) -> Any:
    """The object, for a body of these parts. Of a call that was cut what is there of its first
    256 Ki characters, as a client that reads the stream makes of it."""
    text = arguments.strip(_SPACE)
    if text.startswith("{") and _is_json(text):
        return parts.json(text)
    try:
        begun = from_json(text[:MAX_CHARS], allow_partial="trailing-strings")
    except ValueError:
        return {}
    return begun if isinstance(begun, dict) else {}


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True
