"""Thinking apart from what follows it, whatever the cuts."""

import random

import pytest

from service.chat.reasoning import STYLES, ReasoningParser, reasoning_style_of

THINK = STYLES["think"]
# is_open, text, reasoning, content.
CASES = [
    (False, "<think>\nI <b> </ b>\n\n</think>\n\nYes </think>", "I <b> </ b>", "Yes </think>"),
    (True, "\nso\nI am\n</think>\nYes", "so\nI am", "Yes"),
    (False, " \n<think></think>\n\nYes", "", "Yes"),
    (False, "plain <think>text</think>\n", "", "plain <think>text</think>\n"),
    (False, " <thin", "", " <thin"),
    (True, "never ends </think ", "never ends </think", ""),
    (False, "<think>cut", "cut", ""),
    (False, "", "", ""),
    (False, "\n" * 400, "", "\n" * 400),
    (True, "a" + " " * 400 + "b</think>c", "a" + " " * 400 + "b", "c"),
]


def read(is_open, pieces, style=THINK):
    return read_by(ReasoningParser(style, is_open=is_open), pieces)


def read_by(parser, pieces):
    parts = [*map(parser.push, pieces), parser.flush()]
    return "".join(p.reasoning for p in parts), "".join(p.content for p in parts)


@pytest.mark.parametrize(("is_open", "text", "reasoning", "content"), CASES)
def test_thinking_and_content_are_parted_however_the_text_is_cut(is_open, text, reasoning, content):
    assert read(is_open, [text]) == (reasoning, content)
    assert read(is_open, list(text)) == (reasoning, content)
    for i in range(len(text)):
        assert read(is_open, [text[:i], text[i:]]) == (reasoning, content)


@pytest.mark.parametrize("name", STYLES)
def test_every_style_has_marks_of_its_own(name):
    style = STYLES[name]
    text = f"{style.begin} why {style.end} because"
    assert read(False, list(text), style) == ("why", "because")
    assert read(True, list(text[len(style.begin) :]), style) == ("why", "because")


@pytest.mark.parametrize("name", STYLES)
def test_noise_is_read_alike_however_it_is_cut(name):
    style = STYLES[name]
    chance = random.Random(name)
    pieces = (style.begin, style.end, style.between, style.answer_head, *style.marks, " \n", "hm")
    for _ in range(150):
        noise = "".join(piece[: chance.randint(1, 40)] for piece in chance.choices(pieces, k=6))
        for is_open in (False, True):
            whole = read_by(style.parser(is_open=is_open), [noise])
            assert read_by(style.parser(is_open=is_open), list(noise)) == whole


def test_templates_tell_the_style():
    assert reasoning_style_of("{{ content.split('</think>') }}") is THINK
    assert reasoning_style_of("[THINK] [/THINK]") is STYLES["mistral"]
    assert reasoning_style_of("{{ messages }}") is None
