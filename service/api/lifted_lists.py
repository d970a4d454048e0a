"""Long lists of numbers are taken out of a JSON body before a parser makes objects of all of it.

A parser holds the interpreter lock from beginning to end, on whatever thread: a million token ids
are 70 ms. Here they are found by numpy and parsed a slice at a time, so that other threads run.
Knows no schema, and of JSON only strings and brackets.
"""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

_PIECE_BYTES = 64 << 10
LONG_BYTES = 1024
"""Of a list that is worth it. 64 prompts of less are parsed in a few milliseconds."""
SHORT_BYTES = 64
"""Of thousands of lists, each of them: what less could hold is little."""
_QUOTE = ord('"')
_SIGNIFICANT = np.zeros(256, np.bool_)
_SIGNIFICANT[list(b'[]{}:"')] = True


class BrokenListError(Exception):
    """What stands between the brackets is not JSON."""


@dataclass(slots=True)
class LiftedLists:
    """Lists by the name that stands in their place in the body; None for one that is not of
    integers alone. Names cannot be guessed by who wrote the body.

    A name is a text: a body is only read rightly if each has been taken for the list that it is.
    """

    prefix: str = field(default_factory=lambda: secrets.token_hex(16))
    lists: dict[str, list[int] | None] = field(default_factory=dict)
    _taken: set[str] = field(default_factory=set)

    @property
    def num_items(self) -> int:
        return sum(len(ids) for ids in self.lists.values() if ids)

    def add(self, ids: list[int] | None) -> bytes:
        """What to write in its place."""
        name = f"{self.prefix}{len(self.lists)}"
        self.lists[name] = ids
        return b'"' + name.encode() + b'"'

    def is_name(self, value: Any) -> bool:
        return isinstance(value, str) and value in self.lists

    def take(self, name: str) -> list[int] | None:
        """The list of that name, by who wants a list there."""
        self._taken.add(name)
        return self.lists[name]

    @property
    def is_any_left(self) -> bool:
        """Whether a name stands where nobody wanted a list, and so was read as a text."""
        return len(self._taken) < len(self.lists)


def lift_lists(text: bytes, min_bytes: int) -> tuple[bytes, LiftedLists]:
    """The body with names for its lists that are longer, and the lists. Raises BrokenListError."""
    lifted = LiftedLists()
    kept, end = [], 0
    for start, stop in _flat_lists(text, min_bytes):
        kept += [text[end:start], lifted.add(_parse(text, start + 1, stop))]
        end = stop + 1
    return b"".join((*kept, text[end:])), lifted


def _flat_lists(text: bytes, min_bytes: int) -> Iterator[tuple[int, int]]:
    """Where long lists that hold no string, list or object begin and end, brackets included."""
    is_inside, is_escaped = False, False
    last_position, last_code = 0, 0
    for start in range(0, len(text), _PIECE_BYTES):
        piece = text[start : start + _PIECE_BYTES]
        # What a backslash escapes is overwritten, so that every quote left begins or ends a string.
        if is_escaped:
            piece = b"_" + piece[1:]
        piece = piece.replace(b"\\\\", b"__")
        is_escaped = piece.endswith(b"\\")
        piece = piece.replace(b'\\"', b"__")
        codes = np.frombuffer(piece, np.uint8)
        quotes = np.cumsum(codes == _QUOTE, dtype=np.uint8)
        is_outside = (quotes & 1) == is_inside
        found = np.flatnonzero(is_outside & _SIGNIFICANT[codes])
        positions = np.concatenate(([last_position], found + start))
        kinds = np.concatenate(([last_code], codes[found]))
        for i in np.flatnonzero(np.diff(positions) > min_bytes).tolist():
            if kinds[i] == ord("[") and kinds[i + 1] == ord("]"):
                yield int(positions[i]), int(positions[i + 1])
        last_position, last_code = int(positions[-1]), int(kinds[-1])
        is_inside = bool((int(quotes[-1]) + is_inside) & 1)


def _parse(text: bytes, start: int, stop: int) -> list[int] | None:
    ids: list[int] = []
    while True:
        cut = text.find(b",", start + _PIECE_BYTES, stop)
        end = stop if cut < 0 else cut
        try:
            some = msgspec.json.decode(b"[" + text[start:end] + b"]")
        except msgspec.DecodeError as error:
            raise BrokenListError from error
        if not some:
            raise BrokenListError
        if set(map(type, some)) != {int}:
            return None
        ids += some
        if cut < 0:
            return ids
        start = cut + 1
