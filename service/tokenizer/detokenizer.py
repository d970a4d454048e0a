"""Incremental detokenisation: one small state machine a stream, linear in the tokens.

The concatenation of everything push() and flush() return equals the tokenizer's own decode of all
tokens, whatever the chunking, and no character is ever split over two chunks. A token costs one
table lookup, which is why this runs in the event loop and not in the pool. Knows no stop strings.
"""

import codecs
from collections.abc import Iterable
from typing import Protocol

from service.tokenizer.pieces import TokenPieces

_REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Tokens of one stream in, text out."""

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; empty while a character is incomplete."""
        ...

    def flush(self) -> str:
        """What is left at the end of the stream: incomplete bytes become U+FFFD."""
        ...


class ByteLevelDetokenizer:
    """Byte-level BPE: one UTF-8 stream, invalid bytes replaced as Unicode recommends.

    Python's incremental decoder and Rust's lossy conversion both replace maximal subparts
    (Unicode 15, section 3.9), so they agree on invalid input too.
    """

    def __init__(self, pieces: TokenPieces, *, skip_special_tokens: bool) -> None:
        self._pieces = pieces.visible_pieces if skip_special_tokens else pieces.pieces
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        if token_id >= len(self._pieces):
            return ""
        piece = self._pieces[token_id]
        return self._decode(piece) if isinstance(piece, bytes) else piece

    def flush(self) -> str:
        return self._decode(b"", True)


class ByteFallbackDetokenizer:
    """Sentencepiece-like vocabularies: text pieces, and runs of single bytes between them.

    A run of byte tokens is text if all of it is UTF-8 and one U+FFFD a byte otherwise, so it stays
    undecided until a token that is no byte ends it.
    """

    def __init__(self, pieces: TokenPieces, *, skip_special_tokens: bool) -> None:
        self._table = pieces
        self._pieces = pieces.visible_pieces if skip_special_tokens else pieces.pieces
        self._hidden = pieces.special_ids if skip_special_tokens else frozenset()
        self._run = bytearray()
        self._strip_left = pieces.max_strip_left
        self._is_first = True

    def push(self, token_id: int) -> str:
        if token_id >= len(self._pieces) or token_id in self._hidden:
            return ""
        piece = self._pieces[token_id]
        if isinstance(piece, bytes):
            self._is_first = False
            self._run += piece
            return ""
        if self._is_first:
            self._is_first = False
            piece = self._table.first.get(token_id, piece)
        if self._run:
            piece = self._end_run() + piece
        return self._strip(piece) if self._strip_left else piece

    def flush(self) -> str:
        text = self._end_run()
        return self._strip(text) if self._strip_left else text

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode("utf-8")
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _strip(self, text: str) -> str:
        stripped = text
        while stripped and self._strip_left:
            if stripped[0] != " ":
                self._strip_left = 0
            else:
                stripped = stripped[1:]
                self._strip_left -= 1
        return stripped


def make_detokenizer(pieces: TokenPieces, *, skip_special_tokens: bool) -> Detokenizer:
    kind = ByteLevelDetokenizer if pieces.is_byte_level else ByteFallbackDetokenizer
    return kind(pieces, skip_special_tokens=skip_special_tokens)


def decode_all(pieces: TokenPieces, token_ids: Iterable[int], *, skip_special_tokens: bool) -> str:
    """The whole text of a finished sequence."""
    detokenizer = make_detokenizer(pieces, skip_special_tokens=skip_special_tokens)
    chunks = [detokenizer.push(token_id) for token_id in token_ids]
    return "".join(chunks) + detokenizer.flush()
