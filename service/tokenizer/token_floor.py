"""A lower bound of how many tokens a text has, from its bytes, for refusing what cannot fit.

A token that contains a byte is at most as long as the longest token of the vocabulary that does.
So a byte stands for at least one over that length of a token, and a text for the sum over its
bytes. That holds where every byte of a text ends up in a token, which is read off the tokenizer:
one that may drop, shrink or replace text by less has no floor.
"""

import unicodedata
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from service.tokenizer.pieces import BYTE_OF_CHAR, byte_level_piece

_PIECE_BYTES = 64 << 10
_SLACK = 1e-3
"""For the rounding of a sum of millions of fractions."""


class TokenFloor:
    """weights: by byte value, the least share of a token that a byte is."""

    def __init__(self, weights: npt.NDArray[np.float64]) -> None:
        self._weights = weights

    def count(self, text: str) -> int:
        """Every encoding of the text has at least so many tokens. About 1 ns a byte."""
        data = np.frombuffer(text.encode("utf-8", "surrogatepass"), np.uint8)
        counts = np.zeros(256, np.int64)
        for start in range(0, len(data), _PIECE_BYTES):
            counts += np.bincount(data[start : start + _PIECE_BYTES], minlength=256)
        return int(max(0.0, float(counts @ self._weights) - _SLACK))


def build_token_floor(document: dict[str, Any], is_byte_level: bool) -> TokenFloor | None:
    """document: tokenizer.json. None where no bound can be relied upon."""
    if any(added["lstrip"] or added["rstrip"] for added in document["added_tokens"]):
        return None  # such a token takes in any number of spaces
    if not (_spells_everything(document["model"]) and _keeps_all(_splits(document))):
        return None
    return _byte_level_floor(document) if is_byte_level else _text_floor(document)


def _byte_level_floor(document: dict[str, Any]) -> TokenFloor | None:
    vocabulary: dict[str, int] = document["model"]["vocab"]
    # A byte that is no token by itself could be dropped.
    if not any(step["type"] == "ByteLevel" for step in _splits(document)) or (
        BYTE_OF_CHAR.keys() - vocabulary.keys()
    ):
        return None
    tokens = [byte_level_piece(token) for token in vocabulary]
    tokens += [added["content"].encode() for added in document["added_tokens"]]
    normalizers = {step["type"] for step in _normalizers(document)}
    if not normalizers:
        return TokenFloor(_weights((len(token), set(token)) for token in tokens))
    return _composing_floor(tokens) if normalizers == {"NFC"} else None


def _composing_floor(tokens: list[bytes]) -> TokenFloor:
    """NFC may join an ASCII character with marks that follow, and shortens nothing but characters
    that are not ASCII. So only ASCII counts, each character with the tokens of what it may
    become."""
    weights = _weights((len(token), _ascii_sources(token)) for token in tokens)
    weights[128:] = 0.0
    return TokenFloor(weights)


_COMPOSABLE = frozenset(
    decomposed[0]
    for decomposed in (unicodedata.normalize("NFD", chr(point)) for point in range(0x80, 0x3100))
    if len(decomposed) > 1 and ord(decomposed[0]) < 128
)


def _ascii_sources(token: bytes) -> set[int]:
    """Values of the ASCII characters that may be in a token, joined with marks or not."""
    try:
        text = token.decode("utf-8")
    except UnicodeDecodeError:
        # Parts of characters: of any that can be composed.
        return {byte for byte in token if byte < 128} | {ord(char) for char in _COMPOSABLE}
    bases = text if text.isascii() else unicodedata.normalize("NFD", text)
    return {ord(char) for char in bases if ord(char) < 128}


def _text_floor(document: dict[str, Any]) -> TokenFloor | None:
    """Sentencepiece-like: a token as it is written, with what normalizers write so."""
    vocabulary: dict[str, int] = document["model"]["vocab"]
    sources = _sources(document)
    if sources is None or not document["model"].get("byte_fallback"):
        return None  # any number of unknown characters may become one token
    if not all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)):
        return None
    tokens = [*vocabulary, *(added["content"] for added in document["added_tokens"])]
    return TokenFloor(
        _weights(
            (len(token.encode("utf-8", "surrogatepass")), _text_bytes(token, sources))
            for token in tokens
        )
    )


def _sources(document: dict[str, Any]) -> dict[str, str] | None:
    """A character of the normalized text -> characters of the text that became it. None where
    normalizing does anything else, or makes text shorter."""
    sources: dict[str, str] = {}
    for step in [*_normalizers(document), *_splits(document)]:
        match step:
            case {"type": "Replace", "pattern": {"String": str(pattern)}, "content": str(content)}:
                written = (content, pattern)
            case {"type": "Metaspace", "replacement": str(replacement)}:
                written = (replacement, " ")
            case {"type": "Prepend" | "Digits" | "Split" | "Punctuation"}:
                continue
            case _:
                return None
        content, pattern = written
        if len(content) != 1 or not 0 < len(pattern.encode()) <= len(content.encode()):
            return None
        sources[content] = sources.get(content, "") + pattern
    return sources


def _text_bytes(token: str, sources: dict[str, str]) -> set[int]:
    written = "".join(source for content, source in sources.items() if content in token)
    return set((token + written).encode("utf-8", "surrogatepass"))


def _weights(tokens: Iterator[tuple[int, set[int]]]) -> npt.NDArray[np.float64]:
    """From the length of every token and the byte values that it may stand for."""
    longest = np.zeros(256, np.float64)
    for length, values in tokens:
        for value in values:
            if length > longest[value]:
                longest[value] = length
    return np.divide(1.0, longest, out=np.zeros(256), where=longest > 0)


def _spells_everything(model: dict[str, Any]) -> bool:
    """BPE whose tokens are parts of the text and nothing else, decided without chance."""
    decorations = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    return model["type"] == "BPE" and not any(map(model.get, decorations))


def _keeps_all(splits: list[dict[str, Any]]) -> bool:
    kinds = ("ByteLevel", "Metaspace", "Digits", "Split", "Punctuation")
    return all(step["type"] in kinds and step.get("behavior") != "Removed" for step in splits)


def _normalizers(document: dict[str, Any]) -> list[dict[str, Any]]:
    return _flatten(document.get("normalizer"), "normalizers")


def _splits(document: dict[str, Any]) -> list[dict[str, Any]]:
    return _flatten(document.get("pre_tokenizer"), "pretokenizers")


def _flatten(step: dict[str, Any] | None, members: str) -> list[dict[str, Any]]:
    if step is None:
        return []
    if step["type"] == "Sequence":
        return [inner for member in step[members] for inner in _flatten(member, members)]
    return [step]
