"""JSON of any size as pieces of a few milliseconds each: what is large in a body is left out of it
when it is encoded, and written in its place a slice at a time.

Small bodies are one piece and cost what they did. Knows no schema.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import msgspec

from service.api.openai.wire import encode_json

T = TypeVar("T")
Raw = msgspec.Raw

MAX_VALUES = 16384
"""Numbers in one piece."""
MAX_CHARS = 256 << 10
# A byte that no JSON text has: control characters in strings are written as escapes.
_GAP = b"\x00"


def _numbers(values: Sequence[Any]) -> list[Any]:
    return list(values)


class JsonParts:
    """The parts of one body. Put what array() and text() return into the body, then pieces()."""

    def __init__(self) -> None:
        self._parts: list[Callable[[], Iterator[bytes]]] = []
        self._to_drop: list[tuple[list[Any], int]] = []

    def array(
        self,
        items: Sequence[T],
        render: Callable[[Sequence[T]], list[Any]] = _numbers,
        max_items: int = MAX_VALUES,
    ) -> Any:
        """A JSON array of what render makes of slices of the items, in order."""
        if len(items) <= max_items:
            return render(items)

        def written() -> Iterator[bytes]:
            yield b"["
            for start in range(0, len(items), max_items):
                piece = encode_json(render(items[start : start + max_items]))[1:-1]
                yield b"," + piece if start else piece
            yield b"]"

        return self._leave_out(written)

    def drop(self, items: list[Any], max_items: int) -> None:
        """Empty the list when the body has been written: a million objects take long to free."""
        if len(items) > max_items:
            self._to_drop.append((items, max_items))

    def text(self, text: str) -> Any:
        """A JSON string."""
        if len(text) <= MAX_CHARS:
            return text

        def written() -> Iterator[bytes]:
            yield b'"'
            for start in range(0, len(text), MAX_CHARS):
                yield encode_json(text[start : start + MAX_CHARS])[1:-1]
            yield b'"'

        return self._leave_out(written)

    def json(self, text: str) -> Any:
        """A value whose JSON text is given, and right."""
        if len(text) <= MAX_CHARS:
            return Raw(text.encode("utf-8"))

        def written() -> Iterator[bytes]:
            for start in range(0, len(text), MAX_CHARS):
                yield text[start : start + MAX_CHARS].encode("utf-8")

        return self._leave_out(written)

    def made(self, pieces: Sequence[bytes]) -> Any:
        """A value whose JSON is these pieces."""
        return self._leave_out(lambda: iter(pieces))

    def pieces(self, body: Any) -> Iterator[bytes]:
        """The JSON of the body. Every piece is made when it is asked for; some are empty."""
        gaps = encode_json(body).split(_GAP)
        if len(gaps) != 2 * len(self._parts) + 1:
            raise ValueError("a part of the body is missing from it, or there twice")
        yield gaps[0]
        for number, between in zip(gaps[1::2], gaps[2::2], strict=True):
            yield from self._parts[int(number)]()
            yield between
        for items, max_items in self._to_drop:
            while items:
                del items[-max_items:]
                yield b""

    def _leave_out(self, written: Callable[[], Iterator[bytes]]) -> Any:
        self._parts.append(written)
        return Raw(_GAP + str(len(self._parts) - 1).encode() + _GAP)
