"""The model's tokens as llguidance knows them: read once, which takes a large vocabulary a second.

Of tokenizer.json alone, as the service reads and writes text. The library builds it in one piece
and keeps the interpreter lock: nobody else's code runs meanwhile.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from llguidance import LLTokenizer
from tokenizers import Tokenizer

from workers.loading.model_folder import TOKENIZER_FILE

_TEXT = r'[^"\\\x00-\x1F\x7F]'
_TEXT_LENS = (1, 2, 3, 4, 6, 8, 10, 14, 20, 30)
TOKEN_SLICES = (
    r"[\x20\x0A\x0D\x09]+",
    *(f"{_TEXT}{{1,{length}}}" for length in _TEXT_LENS),
    f"{_TEXT}+",
)
"""Regular expressions for sets of tokens that a mask takes or leaves whole. The library's own are
two for strings, of up to 10 and of up to 30 characters: near the end of a bounded string, each of
100,000 tokens is then looked at."""


class _Settings(msgspec.Struct):
    """What a file may ask for that is of no use where texts are short and alone."""

    truncation: Any = None
    padding: Any = None


def read_vocabulary(folder: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> LLTokenizer:
    """Raises OSError and ValueError where the folder's tokenizer.json cannot be used."""
    text = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
    settings = msgspec.json.decode(text, type=_Settings)
    if settings.truncation is not None or settings.padding is not None:
        text = _without_settings(text)
    return LLTokenizer(
        text, n_vocab=vocab_size, eos_token=list(eos_token_ids), slices=list(TOKEN_SLICES)
    )


def _without_settings(text: str) -> str:
    tokenizer = Tokenizer.from_str(text)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer.to_str()
