"""The shipped tokenizer: lossless on anything, shaped for Python, and one chat format."""

import json
from dataclasses import asdict
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.pre_tokenizers import ByteLevel

from workers.builtin import builtin_draft_path, builtin_model_path
from workers.builtin.tokenizer import (
    SPECIAL_TOKENS,
    VOCAB_SIZE,
    Call,
    Message,
    render_chat,
    train_tokenizer,
)

_SHARED = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
_PIECES = (
    "\n",
    "\n\n",
    "    ",
    "\t",
    " ",
    "\r",
    "def",
    " self",
    "(",
    "):",
    "0",
    "123",
    "é",
    "漢",
    "😀",
)
_CODE = st.lists(st.sampled_from(_PIECES)).map("".join)


def _round_trip(tokenizer: Any, text: str) -> str:
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert all(0 <= i < VOCAB_SIZE for i in ids)
    return tokenizer.decode(ids, skip_special_tokens=False)


@_SHARED
@given(text=st.text() | _CODE)
def test_every_text_comes_back_unchanged(tokenizer: Any, text: str) -> None:
    assert _round_trip(tokenizer, text) == text


@_SHARED
@given(data=st.binary(max_size=200))
def test_bytes_seen_as_text_come_back_unchanged(tokenizer: Any, data: bytes) -> None:
    for text in (data.decode("latin-1"), data.decode("utf-8", errors="replace")):
        assert _round_trip(tokenizer, text) == text


def test_every_byte_is_an_entry_so_nothing_is_unknown(tokenizer: Any) -> None:
    vocabulary = tokenizer.get_vocab()
    assert len(ByteLevel.alphabet()) == 256
    assert set(ByteLevel.alphabet()) <= set(vocabulary)
    assert tokenizer.unk_token is None


def test_vocabulary_has_exactly_4096_entries_and_special_tokens_lead(tokenizer: Any) -> None:
    assert len(tokenizer) == VOCAB_SIZE == 4096
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2, 3]


def test_special_tokens_of_the_chat_format_are_one_token_each(tokenizer: Any) -> None:
    for index, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer.encode(token) == [index]
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token == "<|pad|>"


@pytest.mark.parametrize(
    ("prompt", "rest"),
    [
        ("def f(x):\n", "    return x"),
        ("def __init__(self", ", name):"),
        ("import os\nos.", "path.join"),
        ("x = 1", "234"),
        ("class A:\n    ", "def f(self): pass"),
    ],
)
def test_a_prompt_cut_at_a_natural_place_is_a_prefix_in_tokens(
    tokenizer: Any, prompt: str, rest: str
) -> None:
    whole = tokenizer.encode(prompt + rest)
    cut = tokenizer.encode(prompt)
    assert whole[: len(cut)] == cut


@pytest.mark.parametrize("width", [4, 8, 12])
def test_common_indentation_is_one_token(tokenizer: Any, width: int) -> None:
    assert len(tokenizer.encode("\n" + " " * width + "return")) == 3


def test_chat_template_renders_what_the_model_was_trained_on(tokenizer: Any) -> None:
    messages = [("system", "Be brief."), ("user", "Hi\nthere"), ("assistant", "Hello")]
    rendered = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages], tokenize=False
    )
    assert rendered == render_chat([Message(role, content) for role, content in messages])


def test_chat_template_renders_functions_calls_and_results_as_in_training(tokenizer: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    calls = (Call("f", {"a": "é", "b": 1}), Call("f", {}))
    trained = [
        Message("user", "Call it."),
        Message("assistant", "", calls),
        Message("tool", "1"),
        Message("assistant", "Again:", calls[:1]),
    ]
    sent = [
        {"role": m.role, "content": m.content or None}
        | ({"tool_calls": [{"type": "function", "function": asdict(c)} for c in m.calls]})
        for m in trained
    ]
    rendered = tokenizer.apply_chat_template(sent, tools=[tool], tokenize=False)
    assert rendered == render_chat(trained, [tool])
    assert '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": "é"' in rendered
    assert "Again:\n<tool_call>" in rendered


def test_chat_template_opens_the_assistant_turn_and_joins_text_parts(tokenizer: Any) -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "len?"}]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True
    )
    assert rendered == "<|im_start|>user\nWhat is len?<|im_end|>\n<|im_start|>assistant\n"


def test_draft_has_the_very_same_tokenizer() -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        ours = (builtin_model_path() / name).read_text()
        assert ours == (builtin_draft_path() / name).read_text()
    assert json.loads((builtin_model_path() / "tokenizer.json").read_text())["normalizer"] is None


def test_training_on_too_little_text_is_refused() -> None:
    with pytest.raises(ValueError, match="4096 wanted"):
        train_tokenizer(["def f(): return 1"])
