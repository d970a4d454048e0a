"""Llama 3.2 and 4, and others: a list of calls as Python writes them, [f(a=1), g()].

Values are literals, of Python or of JSON. Nothing is evaluated.
"""

import json
from collections.abc import Mapping
from typing import Any

from service.chat.reading import NotACallError, Reading, expect, skip_space
from service.chat.tools.grammar import CallSyntax, LarkRules
from service.chat.tools.named_arguments import named_arguments
from service.chat.tools.parser import ToolParser
from service.chat.tools.values import MAX_LITERAL_CHARS, literal_json

_MAX_NAME_CHARS = 128
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class PythonicParser(ToolParser):
    name = "pythonic"
    openers = ("<|python_start|>",)
    closers = ("<|python_end|>",)
    first_chars = "["

    @classmethod
    def syntax(cls, template: str) -> CallSyntax:
        return CallSyntax(
            head="",
            middle="(",
            tail=")",
            begin="[",
            separator=", ",
            end="]",
            arguments=_keyword_arguments,
        )

    def _read(self, opener: str) -> Reading[None]:
        yield from expect("[", (yield from skip_space()))
        char = ","
        while char == ",":
            name, _ = yield from _read_name("(", (yield from skip_space()))
            self._announce(name)
            yield from self._read_arguments()
            self._forget()
            char = yield from skip_space()
        if char != "]":
            raise NotACallError

    def _read_arguments(self) -> Reading[None]:
        char = yield from skip_space()
        lead = "{"
        while char != ")":
            key, _ = yield from _read_name("=", char)
            text, char = yield from _read_literal()
            self._argue(f"{lead}{json.dumps(key)}: {_as_json(text)}")
            lead = ", "
            if char == ",":
                char = yield from skip_space()
        self._conclude("{}" if lead == "{" else "}")


def _as_json(text: str) -> str:
    try:
        return literal_json(text.strip())
    except ValueError as error:
        raise NotACallError from error


def _read_name(end: str, char: str) -> Reading[tuple[str, str]]:
    name = ""
    while char != end:
        if len(name) == _MAX_NAME_CHARS or char in "\"'()[]{},=":
            raise NotACallError
        name += char
        char = yield
    return name.strip(), char


def _read_literal() -> Reading[tuple[str, str]]:
    """A literal's text and the comma or bracket that ends it."""
    text, quote, is_escaped = "", "", False
    open_brackets: list[str] = []
    while True:
        char = yield
        if quote:
            if char == quote and not is_escaped:
                quote = ""
            is_escaped = char == "\\" and not is_escaped
        elif char in "\"'":
            quote = char
        elif char in _CLOSING:
            open_brackets.append(_CLOSING[char])
        elif open_brackets:
            if char == open_brackets[-1]:
                open_brackets.pop()
        elif char in ",)":
            return text, char
        if len(text) == MAX_LITERAL_CHARS:
            raise NotACallError
        text += char


def _keyword_arguments(schema: Mapping[str, Any], lark: LarkRules) -> str:
    """Those that are required, then the others, each as JSON."""
    return named_arguments(schema, lark, separator=", ", value=_keyword_argument)


def _keyword_argument(name: str, schema: Mapping[str, Any], lark: LarkRules) -> str:
    return lark.add(f"{lark.text(name + '=')} {lark.json(schema)}")
