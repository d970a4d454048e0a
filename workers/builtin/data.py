"""What the models are trained and judged on, as token ids: documents, chats, calls and JSON.

Knows the corpus and the ways of making conversations. Knows no model.
"""

import hashlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from workers.builtin.call_scores import Example
from workers.builtin.chat_examples import conversations, persona_conversations
from workers.builtin.corpus import Document, is_held_out
from workers.builtin.json_examples import JSON_KINDS, JsonConversations
from workers.builtin.tokenizer import (
    END_OF_TEXT_ID,
    VOCAB_SIZE,
    Conversation,
    Message,
    render_chat,
    train_tokenizer,
)
from workers.builtin.tool_examples import KINDS, ToolConversations
from workers.builtin.words import Lexicon, words_of


@dataclass(frozen=True, slots=True)
class Texts:
    """The corpus and the conversations as text; those of functions and JSON as `made`."""

    train: list[Document]
    held_out: list[Document]
    chats: list[list[Message]]
    held_out_chats: list[list[Message]]
    made: list[str]
    examples: list[Example]  # held out


@dataclass(frozen=True, slots=True)
class Tokens:
    """The texts as token ids, split by whole files."""

    train: list[npt.NDArray[np.int64]]  # one array a document, end-of-text included
    held_out_text: npt.NDArray[np.int64]
    held_out_chat: npt.NDArray[np.int64]
    held_out_bytes: int  # of the documents behind held_out_text, separators not counted
    num_train_text_tokens: int
    num_made_tokens: int
    unigram_loss: float  # nats per token of held_out_text


def collect_texts(
    documents: Sequence[Document], seed: int, num_made: int, num_examples: int
) -> Texts:
    """All texts; `num_made` conversations with functions and as many with JSON, and
    `num_examples` held-out ones of each kind."""
    train = [d for d in documents if not is_held_out(d.group)]
    held_out = [d for d in documents if is_held_out(d.group)]
    persona = persona_conversations(seed)
    chats = conversations(train, seed)
    held_out_chats = conversations(held_out, seed)
    words = words_of(d.text for d in train)
    small_talk = chats[:: max(1, len(chats) // 2000)] + persona
    held_out_talk = held_out_chats + persona
    return Texts(
        train=train,
        held_out=held_out,
        chats=chats + persona,
        held_out_chats=held_out_chats,
        made=list(_made(seed, num_made, words, small_talk)),
        examples=list(_examples(seed, num_examples, words, held_out_talk)),
    )


def new_tokenizer(texts: Texts) -> Tokenizer:
    """One that is trained on the documents and a part of the chats."""
    chats = (render_chat(chat) for chat in texts.chats[::4])
    return train_tokenizer([*(d.text for d in texts.train), *chats])


def tokenize(tokenizer: Tokenizer, texts: Texts) -> Tokens:
    """Every text as token ids."""

    def encode(texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        return [
            np.array([*encoding.ids, END_OF_TEXT_ID], dtype=np.int64)
            for encoding in tokenizer.encode_batch(list(texts))
        ]

    train_text = encode([d.text for d in texts.train])
    made = encode(texts.made)
    held_out_text = np.concatenate(encode([d.text for d in texts.held_out]))
    counts = np.bincount(np.concatenate(train_text), minlength=VOCAB_SIZE) + 1
    unigram = -np.log(counts / counts.sum())
    return Tokens(
        train=train_text + encode([render_chat(chat) for chat in texts.chats]) + made,
        held_out_text=held_out_text,
        held_out_chat=np.concatenate(encode([render_chat(c) for c in texts.held_out_chats])),
        held_out_bytes=sum(len(d.text.encode()) for d in texts.held_out),
        num_train_text_tokens=sum(map(len, train_text)),
        num_made_tokens=sum(map(len, made)),
        unigram_loss=float(unigram[held_out_text].mean()),
    )


def made_digest(made: Sequence[str]) -> str:
    """SHA-256 over all conversations that were made: equal ones mean equal text."""
    digest = hashlib.sha256()
    for text in made:
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()


def _made(
    seed: int, num: int, words: Sequence[str], small_talk: Sequence[Sequence[Message]]
) -> Iterator[str]:
    rng = random.Random(seed)
    lexicon = Lexicon(rng, words, held_out=False)
    calls = ToolConversations(rng, lexicon, small_talk)
    answers = JsonConversations(rng, lexicon)
    for _ in range(num):
        for made in (calls.conversation(), answers.conversation()):
            yield render_chat(made.messages, made.tools)


def _examples(
    seed: int, num: int, words: Sequence[str], small_talk: Sequence[Sequence[Message]]
) -> Iterator[Example]:
    rng = random.Random(seed)
    lexicon = Lexicon(rng, words, held_out=True)
    calls = ToolConversations(rng, lexicon, small_talk)
    answers = JsonConversations(rng, lexicon)
    for kind in KINDS:
        yield from (Example(kind, _cut(calls.opening(kind))) for _ in range(num))
    for kind in JSON_KINDS:
        yield from (Example(f"JSON, {kind}", answers.of_kind(kind)) for _ in range(num))


def _cut(conversation: Conversation) -> Conversation:
    """Up to the first answer of the assistant."""
    messages = conversation.messages
    end = next(i for i, message in enumerate(messages) if message.role == "assistant")
    return Conversation(messages[: end + 1], conversation.tools)
