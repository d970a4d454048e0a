"""JSON read character by character (RFC 8259), as far as finding where a value ends and whether it
is one. Keeps a stack of brackets and nothing else; takes the same time for every character.
"""

import re
from collections.abc import Callable
from typing import Any

MAX_DEPTH = 128
_SPACE = " \t\n\r"
_NUMBER_CHARS = "0123456789+-.eE"
_MAX_NUMBER_CHARS = 512
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LITERALS = {"t": "rue", "f": "alse", "n": "ull"}
_HEX = "0123456789abcdefABCDEF"

_State = Callable[[str], Any]  # returns the next state


class NotJsonError(Exception):
    """The character cannot follow."""


class JsonScanner:
    """Feed it one value's characters, from its first one. A number by itself is refused, as only
    what follows would end it."""

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._state: _State = self._value
        self._is_key = False
        self._rest = ""
        self._number = ""
        self._is_done = False

    def feed(self, char: str) -> bool:
        """Whether the value ends with this character. Raises NotJsonError."""
        self._state = self._state(char)
        return self._is_done

    def _value(self, char: str) -> _State:
        if char in _SPACE:
            return self._value
        if char in "{[":
            return self._open(char)
        if char == '"':
            self._is_key = False
            return self._string
        if char in _LITERALS:
            self._rest = _LITERALS[char]
            return self._literal
        if self._stack and char in "-0123456789":
            self._number = char
            return self._digits
        raise NotJsonError

    def _open(self, char: str) -> _State:
        if len(self._stack) == MAX_DEPTH:
            raise NotJsonError
        self._stack.append(char)
        return self._first_key if char == "{" else self._first_item

    def _first_key(self, char: str) -> _State:
        return self._close() if char == "}" else self._stay(self._first_key, self._key, char)

    def _first_item(self, char: str) -> _State:
        return self._close() if char == "]" else self._stay(self._first_item, self._value, char)

    def _stay(self, state: _State, otherwise: _State, char: str) -> Any:
        return state if char in _SPACE else otherwise(char)

    def _key(self, char: str) -> _State:
        if char in _SPACE:
            return self._key
        if char != '"':
            raise NotJsonError
        self._is_key = True
        return self._string

    def _string(self, char: str) -> _State:
        if char == '"':
            return self._colon if self._is_key else self._end()
        if char < " ":
            raise NotJsonError
        return self._escape if char == "\\" else self._string

    def _escape(self, char: str) -> _State:
        if char == "u":
            self._rest = "xxxx"
            return self._hex
        if char not in '"\\/bfnrt':
            raise NotJsonError
        return self._string

    def _hex(self, char: str) -> _State:
        if char not in _HEX:
            raise NotJsonError
        self._rest = self._rest[1:]
        return self._hex if self._rest else self._string

    def _literal(self, char: str) -> _State:
        if char != self._rest[0]:
            raise NotJsonError
        self._rest = self._rest[1:]
        return self._literal if self._rest else self._end()

    def _digits(self, char: str) -> _State:
        if char in _NUMBER_CHARS and len(self._number) < _MAX_NUMBER_CHARS:
            self._number += char
            return self._digits
        if not _NUMBER.fullmatch(self._number):
            raise NotJsonError
        next_state: _State = self._after(char)
        return next_state

    def _colon(self, char: str) -> _State:
        if char == ":":
            return self._value
        return self._colon if char in _SPACE else self._refuse(char)

    def _after(self, char: str) -> _State:
        if char in _SPACE:
            return self._after
        is_object = self._stack[-1] == "{"
        if char == ",":
            return self._key if is_object else self._value
        return self._close() if char == ("}" if is_object else "]") else self._refuse(char)

    def _close(self) -> _State:
        self._stack.pop()
        return self._end()

    def _end(self) -> _State:
        self._is_done = not self._stack
        return self._refuse if self._is_done else self._after

    def _refuse(self, char: str) -> _State:
        raise NotJsonError
