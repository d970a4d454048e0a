"""Prompts behind which a head's target speaks, as token ids.

Of the built-in model: beginnings of documents of its corpus, and its conversations up to the first
answer; the same corpus is there to be read as it is, too. Of others: lines of a file.
"""

import itertools
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
_PIECE_TOKENS = 256
_LONG_PIECE_TOKENS = 768
_CHATS_ONE_IN = 4
_TOKENS_OF_MADE = 1500
"""Of what is read, for each pair of conversations made: about a third of it are such ones."""


class Prompts(NamedTuple):
    """Each at most _MAX_PROMPT_TOKENS tokens."""

    train: list[list[int]]
    held_out: list[list[int]]


def builtin_prompts(
    tokenizer: Tokenizer, stdlib: Path, num: int, num_held_out: int, seed: int
) -> Prompts:
    """A third of documents, of chats, and of conversations with functions or JSON, shuffled. Held
    out are those of what the target never saw."""
    rng = random.Random(seed)
    texts = collect_texts(collect_corpus(stdlib), seed, num // 6 + 1, num_held_out // 24 + 1)
    held_out_made = [example.prompt for example in texts.examples]
    return Prompts(
        _mixed(tokenizer, rng, texts.train, texts.chats, texts.made, num),
        _mixed(tokenizer, rng, texts.held_out, texts.held_out_chats, held_out_made, num_held_out),
    )


def builtin_reading(
    tokenizer: Tokenizer, stdlib: Path, max_tokens: int, seed: int
) -> list[list[int]]:
    """Pieces of the documents, chats and other conversations that the target was trained on, of
    _PIECE_TOKENS and of _LONG_PIECE_TOKENS at most; shuffled, max_tokens together at most."""
    rng = random.Random(seed + 1)
    texts = collect_texts(collect_corpus(stdlib), seed, max_tokens // _TOKENS_OF_MADE, 1)
    chats = rng.sample(texts.chats, len(texts.chats) // _CHATS_ONE_IN)
    whole = [document.text for document in texts.train]
    whole += [*map(render_chat, chats), *texts.made]
    encodings = tokenizer.encode_batch(whole, add_special_tokens=False)
    pieces = [piece for one in encodings for piece in _pieces(one.ids, rng)]
    rng.shuffle(pieces)
    lens = itertools.accumulate(map(len, pieces))
    return [piece for piece, end in zip(pieces, lens, strict=True) if end <= max_tokens]


def file_prompts(
    tokenizer: Tokenizer, file: Path, num: int, num_held_out: int, seed: int
) -> Prompts:
    """A prompt a line, special tokens written out. Raises ValueError where there are none beside
    those held out."""
    lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    if len(lines) <= num_held_out:
        raise ValueError(f"{file} has {len(lines)} prompts, of which {num_held_out} are held out")
    random.Random(seed).shuffle(lines)
    ids = [_cut(tokenizer, line) for line in lines[: num + num_held_out]]
    return Prompts(ids[num_held_out:], ids[:num_held_out])


def _pieces(ids: list[int], rng: random.Random) -> Iterator[list[int]]:
    """Of one text, from end to end; one in four is long."""
    while len(ids) >= _MIN_DOCUMENT_TOKENS:
        length = rng.choice((_PIECE_TOKENS, _PIECE_TOKENS, _PIECE_TOKENS, _LONG_PIECE_TOKENS))
        yield ids[:length]
        ids = ids[length:]


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
    prompts += [next(beginnings) for _ in range(num - len(prompts))]
    rng.shuffle(prompts)
    return prompts


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
