"""What each token contributes to decoded text, worked out once from the tokenizer's own decoder.

Two families exist among causal models: byte-level BPE, where a token is a run of bytes, and
sentencepiece-like vocabularies, where a token is text or, as a fallback, one byte; encoders have
WordPiece, too, where a token is a word or goes on with one. A decoder of any other shape is
refused, and what is accepted is compared with the tokenizer's own decode before use.
"""

import json
import random
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from workers.errors import ModelLoadError

Piece = bytes | str


@dataclass(frozen=True, slots=True)
class TokenPieces:
    """By token id: the piece a token adds to text; "" or b"" for ids that add nothing.

    is_byte_level: pieces are byte runs of one UTF-8 stream; otherwise str pieces are text and
    bytes pieces (of length 1) are byte-fallback tokens. special_ids: what skip_special_tokens
    skips. first: pieces that differ at the very start of a text. max_strip_left: spaces removed
    from the start of the whole text.
    """

    is_byte_level: bool
    pieces: tuple[Piece, ...]
    visible_pieces: tuple[Piece, ...]
    special_ids: frozenset[int]
    first: dict[int, str] = field(default_factory=dict)
    max_strip_left: int = 0

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token by itself, special tokens as their text."""
        piece = self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""
        return piece.encode("utf-8") if isinstance(piece, str) else piece


@dataclass(slots=True)
class _TextRules:
    """The steps of a sentencepiece-like decoder, in the one order that occurs in practice."""

    replacements: list[tuple[str, str]] = field(default_factory=list)
    metaspace: str | None = None
    drops_first_metaspace: bool = False
    has_byte_fallback: bool = False
    is_fused: bool = False
    max_strip_left: int = 0


def build_token_pieces(tokenizer: Tokenizer, tokenizer_json: str) -> TokenPieces:
    """Raises ModelLoadError for a decoder that cannot be followed exactly token by token."""
    document = json.loads(tokenizer_json)
    steps = _flatten(document.get("decoder"))
    tokens = _tokens_by_id(tokenizer)
    special_ids = frozenset(
        token_id
        for token_id, added in tokenizer.get_added_tokens_decoder().items()
        if added.special
    )
    if [step["type"] for step in steps] == ["ByteLevel"]:
        pieces: tuple[Piece, ...] = tuple(map(byte_level_piece, tokens))
        result = TokenPieces(True, pieces, _hide(pieces, special_ids, b""), special_ids)
    elif [step["type"] for step in steps] == ["WordPiece"]:
        result = _word_pieces(tokenizer, tokens, special_ids)
    else:
        rules = _read_text_rules(steps)
        pieces = tuple(_text_piece(token, rules) for token in tokens)
        result = TokenPieces(
            False,
            pieces,
            _hide(pieces, special_ids, ""),
            special_ids,
            _first_pieces(tokens, rules),
            rules.max_strip_left,
        )
    return result


def _word_pieces(
    tokenizer: Tokenizer, tokens: list[str | None], special_ids: frozenset[int]
) -> TokenPieces:
    """What a token becomes depends on whether it is the first one, and on nothing else."""
    decode = tokenizer.decoder.decode
    firsts = ["" if token is None else decode([token]) for token in tokens]
    later: tuple[Piece, ...] = tuple(
        "" if token is None else decode(["a", token]).removeprefix("a") for token in tokens
    )
    first = {i: text for i, text in enumerate(firsts) if text != later[i]}
    return TokenPieces(False, later, _hide(later, special_ids, ""), special_ids, first)


def sample_token_ids(pieces: TokenPieces, num_sequences: int, length: int) -> list[list[int]]:
    """Seeded random sequences for comparing this module with the tokenizer's own decode."""
    rng = random.Random(0)
    return [
        [rng.randrange(len(pieces.pieces)) for _ in range(length)] for _ in range(num_sequences)
    ]


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        raise ModelLoadError("the tokenizer has no decoder, so tokens cannot become text")
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _tokens_by_id(tokenizer: Tokenizer) -> list[str | None]:
    ids = tokenizer.get_vocab(with_added_tokens=True).values()
    return [tokenizer.id_to_token(token_id) for token_id in range(max(ids, default=-1) + 1)]


def _hide(pieces: tuple[Piece, ...], hidden: frozenset[int], empty: Piece) -> tuple[Piece, ...]:
    return tuple(empty if i in hidden else piece for i, piece in enumerate(pieces))


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte, inverted (Radford et al., 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHAR = _byte_alphabet()


def byte_level_piece(token: str | None) -> bytes:
    if token is None:
        return b""
    try:
        return bytes(BYTE_OF_CHAR[char] for char in token)
    except KeyError:
        return token.encode("utf-8")


def _read_text_rules(steps: list[dict[str, Any]]) -> _TextRules:
    rules = _TextRules()
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": pattern}, "content": content} if (
                not rules.has_byte_fallback and not rules.is_fused
            ):
                rules.replacements.append((pattern, content))
            case {"type": "Metaspace", "replacement": replacement} if not rules.is_fused:
                rules.metaspace = replacement
                rules.drops_first_metaspace = step.get("prepend_scheme", "always") != "never"
            case {"type": "ByteFallback"}:
                rules.has_byte_fallback = True
            case {"type": "Fuse"}:
                rules.is_fused = True
            case {"type": "Strip", "content": " ", "start": start, "stop": 0} if rules.is_fused:
                rules.max_strip_left = start
            case _:
                raise ModelLoadError(
                    f"the tokenizer's decoder step {step['type']} is not one that Tessera can "
                    "follow token by token; byte-level, sentencepiece-like and WordPiece ones are"
                )
    return rules


def _text_piece(token: str | None, rules: _TextRules) -> Piece:
    if token is None:
        return ""
    text = token
    for pattern, content in rules.replacements:
        text = text.replace(pattern, content)
    if rules.has_byte_fallback and (byte := _fallback_byte(text)) is not None:
        return byte
    return text.replace(rules.metaspace, " ") if rules.metaspace else text


def _first_pieces(tokens: list[str | None], rules: _TextRules) -> dict[int, str]:
    """The Metaspace decoder drops every replacement character of a text's first token."""
    if rules.metaspace is None or not rules.drops_first_metaspace:
        return {}
    return {
        i: token.replace(rules.metaspace, "")
        for i, token in enumerate(tokens)
        if token is not None and rules.metaspace in token
    }


def _fallback_byte(token: str) -> bytes | None:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes.fromhex(token[3:5])
        except ValueError:
            return None
    return None
