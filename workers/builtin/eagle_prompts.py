"""Prompts behind which a head's target speaks, as token ids.

Of the built-in model: beginnings of documents of its corpus, and its conversations up to the first
answer. Of others: lines of a file.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer

from workers.builtin.corpus import Document, collect_corpus
from workers.builtin.data import collect_texts
from workers.builtin.tokenizer import Message, render_chat

_ANSWER = "<|im_start|>assistant\n"
_MAX_PROMPT_TOKENS = 96
_MIN_DOCUMENT_TOKENS = 8
_DOCUMENT_CHARS = 600
_HELD_OUT_ONE_IN = 12


class Prompts(NamedTuple):
    """Each at most _MAX_PROMPT_TOKENS tokens."""

    train: list[list[int]]
    held_out: list[list[int]]


def builtin_prompts(tokenizer: Tokenizer, stdlib: Path, num: int, seed: int) -> Prompts:
    """A third of documents, of chats, and of conversations with functions or JSON. Held out are
    those of what the target never saw."""
    rng = random.Random(seed)
    num_held_out = max(3, num // _HELD_OUT_ONE_IN)
    texts = collect_texts(collect_corpus(stdlib), seed, num // 6 + 1, num_held_out // 24 + 1)
    held_out_made = [example.prompt for example in texts.examples]
    return Prompts(
        _mixed(tokenizer, rng, texts.train, texts.chats, texts.made, num),
        _mixed(tokenizer, rng, texts.held_out, texts.held_out_chats, held_out_made, num_held_out),
    )


def file_prompts(tokenizer: Tokenizer, file: Path, num: int, seed: int) -> Prompts:
    """A prompt a line, special tokens written out; every _HELD_OUT_ONE_IN-th is held out."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    random.Random(seed).shuffle(lines)
    ids = [_cut(tokenizer, line) for line in lines[:num]]
    held_out = ids[::_HELD_OUT_ONE_IN]
    return Prompts([one for i, one in enumerate(ids) if i % _HELD_OUT_ONE_IN], held_out)


def _mixed(
    tokenizer: Tokenizer,
    rng: random.Random,
    documents: Sequence[Document],
    chats: Sequence[list[Message]],
    made: Sequence[str],
    num: int,
) -> list[list[int]]:
    beginnings = _beginnings(tokenizer, rng, documents)
    asked = [render_chat(rng.choice(chats)) for _ in range(num // 3)]
    asked += rng.sample(list(made), min(num // 3, len(made)))
    prompts = [_cut(tokenizer, text.partition(_ANSWER)[0] + _ANSWER) for text in asked]
    return prompts + [next(beginnings) for _ in range(num - len(prompts))]


def _beginnings(
    tokenizer: Tokenizer, rng: random.Random, documents: Sequence[Document]
) -> Iterator[list[int]]:
    """From any line of a document, without end."""
    while True:
        lines = rng.choice(documents).text.splitlines(keepends=True)
        text = "".join(lines[rng.randrange(len(lines)) :])[:_DOCUMENT_CHARS]
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) >= _MIN_DOCUMENT_TOKENS:
            yield ids[: rng.randrange(_MIN_DOCUMENT_TOKENS, _MAX_PROMPT_TOKENS)]


def _cut(tokenizer: Tokenizer, text: str) -> list[int]:
    """Its last tokens."""
    return tokenizer.encode(text, add_special_tokens=False).ids[-_MAX_PROMPT_TOKENS:]
