"""Calls whose arguments stand one by one between tags, values as they are."""

import json

from service.chat.reading import Reading
from service.chat.tools.parser import ToolParser
from service.chat.tools.values import argument_json

MAX_VALUE_CHARS = 1 << 20


class TaggedParser(ToolParser):
    """A ToolParser that turns named values into pieces of a JSON object."""

    _function = ""
    _num_arguments = 0

    def _begin_call(self, name: str) -> None:
        self._announce(name)
        self._function = name
        self._num_arguments = 0

    def _add_argument(self, key: str, raw: str) -> None:
        properties = self._tools[self._function].parameters.get("properties", {})
        schema = properties.get(key, {}) if isinstance(properties, dict) else {}
        value = argument_json(raw, schema if isinstance(schema, dict) else {})
        lead = ", " if self._num_arguments else "{"
        self._num_arguments += 1
        self._argue(f"{lead}{json.dumps(key, ensure_ascii=False)}: {value}")

    def _end_call(self) -> None:
        self._conclude("}" if self._num_arguments else "{}")


def read_name(char: str, ends: str, max_chars: int) -> Reading[tuple[str, str]]:
    """A name from its first character, and the character that ends it."""
    name = ""
    while char not in ends and len(name) <= max_chars:
        name += char
        char = yield
    return name.strip(), char
