"""A model folder for shapes without weights: a config.json, and a tokenizer that knows every id.

The service needs a tokenizer where the engine needs none. This one extends the built-in model's
byte-level BPE by invented merges, so that every id below the config's vocabulary size is text of a
few characters, as with a real model's. Seeded: the same folder for the same config.
"""

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from workers.builtin import builtin_model_path

MAX_TOKEN_CHARS = 8


def make_model_folder(config: Path, parent: Path) -> Path:
    """parent/NAME for NAME.json, for load_format=dummy. Raises ValueError: vocabulary too small."""
    folder = parent / config.stem
    folder.mkdir(parents=True)
    shutil.copy(config, folder / "config.json")
    builtin = builtin_model_path()
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(builtin / name, folder / name)
    tokenizer = json.loads((builtin / "tokenizer.json").read_text(encoding="utf-8"))
    vocab_size = json.loads(config.read_text(encoding="utf-8"))["vocab_size"]
    extend_tokenizer(tokenizer, vocab_size)
    text = json.dumps(tokenizer, ensure_ascii=False)
    (folder / "tokenizer.json").write_text(text, encoding="utf-8")
    return folder


def extend_tokenizer(tokenizer: dict[str, Any], vocab_size: int) -> None:
    """Add merges of known tokens to a parsed tokenizer.json until it has vocab_size tokens."""
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    merges: list[list[str]] = tokenizer["model"]["merges"]
    if len(vocab) > vocab_size:
        raise ValueError(f"the built-in tokenizer has {len(vocab)} tokens, more than {vocab_size}")
    special = {token["content"] for token in tokenizer["added_tokens"]}
    known = [token for token in vocab if token not in special]
    random.Random(0).shuffle(known)
    for left, right in _pairs(known):
        if len(vocab) == vocab_size:
            return
        merged = left + right
        if len(merged) <= MAX_TOKEN_CHARS and merged not in vocab:
            vocab[merged] = len(vocab)
            merges.append([left, right])
    raise ValueError(f"no {vocab_size} tokens of at most {MAX_TOKEN_CHARS} characters can be made")


def _pairs(tokens: list[str]) -> Iterator[tuple[str, str]]:
    """All ordered pairs of different tokens, every token once in each round."""
    for distance in range(1, len(tokens)):
        for index, left in enumerate(tokens):
            yield left, tokens[(index + distance) % len(tokens)]
