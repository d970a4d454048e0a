"""Calls that are JSON objects: {"name": ..., "arguments": {...}}, in whatever order."""

from dataclasses import dataclass

from service.chat.reading import (
    NotACallError,
    Reading,
    read_json,
    read_string,
    skip_space,
)
from service.chat.tools.parser import ToolParser

_ARGUMENTS = ("arguments", "parameters")


@dataclass(slots=True)
class _Call:
    """What is known of a call. early: arguments that came before the name."""

    name: str = ""
    early: str = ""
    is_told: bool = False


class CallObjectParser(ToolParser):
    """A ToolParser that can read such objects."""

    def _read_call(self, char: str) -> Reading[None]:
        """From the first brace to the last one."""
        if char != "{":
            raise NotACallError
        call = _Call()
        while char != "}":
            key = yield from self._read_key((yield from skip_space()))
            yield from self._read_field(key, (yield from skip_space()), call)
            char = yield from skip_space()
            if char not in ",}":
                raise NotACallError
        if not call.is_told:
            raise NotACallError
        self._forget()

    def _read_field(self, key: str, char: str, call: "_Call") -> Reading[None]:
        if key == "name" and not call.name:
            call.name = yield from read_string(char)
            if call.early:
                self._tell(call)
                self._conclude(call.early)
        elif key in _ARGUMENTS and not call.is_told and not call.early:
            yield from self._read_arguments(char, call)
        else:
            yield from read_json(char, lambda _: None)

    def _read_arguments(self, char: str, call: "_Call") -> Reading[None]:
        """Told as they come, once the name is known."""
        if char != "{":
            raise NotACallError
        if call.name:
            self._tell(call)
            yield from self._argue_json(char)
        else:
            call.early = yield from _read_text(char)

    def _tell(self, call: "_Call") -> None:
        self._announce(call.name)
        call.is_told = True

    def _read_key(self, char: str) -> Reading[str]:
        key = yield from read_string(char)
        if (yield from skip_space()) != ":":
            raise NotACallError
        return key

    def _read_list(self, char: str) -> Reading[None]:
        """Objects between brackets; at least one."""
        if char != "[":
            raise NotACallError
        while char != "]":
            yield from self._read_call((yield from skip_space()))
            char = yield from skip_space()
            if char not in ",]":
                raise NotACallError
        self._forget()

    def _read_separated(self, char: str, separators: str) -> Reading[str]:
        """Objects with a character between two; ends with one that is none of them."""
        while True:
            yield from self._read_call(char)
            char = yield from skip_space()
            if char not in separators:
                return char
            char = yield from skip_space()


def _read_text(char: str) -> Reading[str]:
    chars: list[str] = []
    yield from read_json(char, chars.append)
    return "".join(chars)
