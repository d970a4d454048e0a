"""How much structure a JSON text has, counted before anything is built from it.

A parser makes an object of every value, with the interpreter lock held: eight megabytes of `[1],`
stop an event loop for seconds. Counting is done by numpy in pieces, which lets other threads run.
Knows no schema, and of JSON only strings, so it counts alike in what is malformed.
"""

from dataclasses import dataclass

import numpy as np

_PIECE_BYTES = 64 << 10
_QUOTE = ord('"')
_BACKSLASH = b"\\"
_OPENINGS = np.zeros(256, np.bool_)
_OPENINGS[list(b"[{:")] = True


@dataclass(frozen=True, slots=True)
class JsonShape:
    """num_items: commas. num_nodes: arrays, objects and named fields. Outside of strings."""

    num_items: int
    num_nodes: int


def measure(text: bytes) -> JsonShape:
    """Takes about 10 ns a byte."""
    num_items = num_nodes = 0
    is_inside, is_escaped = False, False
    for start in range(0, len(text), _PIECE_BYTES):
        piece = text[start : start + _PIECE_BYTES]
        # What a backslash escapes is dropped with it, so that every quote left begins or ends a
        # string. Pairs of backslashes go first, from the left, as a parser reads them.
        piece = piece[is_escaped:].replace(b"\\\\", b"")
        is_escaped = piece.endswith(_BACKSLASH)
        piece = piece.replace(b'\\"', b"")
        codes = np.frombuffer(piece, np.uint8)
        # Parities of the quotes seen so far; uint8 wraps at an even number.
        quotes = np.cumsum(codes == _QUOTE, dtype=np.uint8)
        is_outside = (quotes & 1) == is_inside
        num_items += int(np.count_nonzero(is_outside & (codes == ord(","))))
        num_nodes += int(np.count_nonzero(is_outside & _OPENINGS[codes]))
        if len(quotes):
            is_inside = bool((int(quotes[-1]) + is_inside) & 1)
    return JsonShape(num_items, num_nodes)
