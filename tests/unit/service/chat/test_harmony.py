"""gpt-oss's messages on channels: thinking, answers and calls, whatever the cuts."""

import itertools
import json
import random

import pytest

from service.chat.options import Tool
from service.chat.parser import ChatParser
from service.chat.reasoning import STYLES, reasoning_style_of
from service.chat.tools.families import FAMILIES
from tests.unit.service.chat.test_tool_parsers import cuts, joined

TOOLS = {"weather": Tool("weather", {"type": "object"}), "now": Tool("now", {"type": "object"})}
THOUGHT = "<|channel|>analysis<|message|>We <b> should\nlook.<|end|>"
CALL = (
    "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
    '{"city": "Paris <|x|>"}'
)
WEATHER = ("weather", {"city": "Paris <|x|>"})
ANSWER = "<|channel|>final<|message|>It is 5 < 6.\n"
# is_open, text, reasoning, content, calls.
CASES = {
    "an answer": (False, ANSWER, "", "It is 5 < 6.\n", []),
    "thinking and an answer": (
        False,
        f"{THOUGHT}<|start|>assistant{ANSWER}<|return|>",
        "We <b> should\nlook.",
        "It is 5 < 6.\n",
        [],
    ),
    "thinking and a call": (False, THOUGHT + CALL, "We <b> should\nlook.", "", [WEATHER]),
    "a call that ends": (
        False,
        CALL.removeprefix("<|start|>assistant") + "<|call|>",
        "",
        "",
        [WEATHER],
    ),
    "two calls": (
        False,
        CALL
        + "<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{}<|call|>",
        "",
        "",
        [WEATHER, ("now", {})],
    ),
    "the recipient by the role": (
        False,
        " to=functions.now<|channel|>commentary json<|message|>{}<|call|>",
        "",
        "",
        [("now", {})],
    ),
    "words to the user before a call": (
        False,
        f"<|channel|>commentary<|message|>I look.<|end|>{CALL}",
        "",
        "I look.",
        [WEATHER],
    ),
    "within thinking": (
        True,
        f"so<|end|><|start|>assistant{ANSWER}",
        "so",
        "It is 5 < 6.\n",
        [],
    ),
    "thinking that never ends": (False, "<|channel|>analysis<|message|>a <|en", "a <|en", "", []),
    "no message at all": (False, '{"a": "<|channel|>"}', "", '{"a": "<|channel|>"}', []),
    "a message without its end": (
        False,
        f"<|channel|>analysis<|message|>a{ANSWER}",
        "a",
        "It is 5 < 6.\n",
        [],
    ),
}


def read(is_open, pieces, tools=TOOLS):
    numbers = itertools.count()
    calls = FAMILIES["harmony"](tools, lambda: f"call_{next(numbers)}", is_parallel=True)
    thoughts = STYLES["harmony"].parser(is_open=is_open)
    parser = ChatParser(thoughts, calls, shows_reasoning=True)
    parts = [*map(parser.push, pieces), parser.flush()]
    content, found = joined(parts)
    return "".join(part.reasoning for part in parts), content, found


@pytest.mark.parametrize("case", CASES)
def test_channels_are_told_apart_however_the_text_is_cut(case):
    is_open, text, reasoning, content, calls = CASES[case]
    whole = read(is_open, [text])
    assert whole[:2] == (reasoning, content)
    assert [(name, json.loads(arguments)) for _, name, arguments in whole[2]] == calls
    for pieces in cuts(text):
        assert read(is_open, pieces) == whole


def test_every_beginning_of_a_text_is_read_alike_however_it_is_cut():
    for is_open, text, *_ in CASES.values():
        for stop in range(len(text)):
            assert read(is_open, [text[:stop]]) == read(is_open, list(text[:stop]))


def test_a_message_to_an_unknown_function_is_content():
    text = CALL.replace("weather", "unknown")
    reasoning, content, calls = read(False, [text])
    assert (reasoning, calls) == ("", [])
    assert '{"city": "Paris <|x|>"}' in content
    assert read(False, list(text)) == (reasoning, content, calls)


def test_noise_is_read_alike_however_it_is_cut():
    chance = random.Random(1)
    samples = [text for _, text, *_ in CASES.values()]
    for _ in range(300):
        text = "".join(
            sample[start : start + chance.randrange(1, 60)]
            for sample in chance.choices(samples, k=4)
            for start in [chance.randrange(len(sample))]
        )
        assert read(False, [text]) == read(False, list(text))


def test_templates_tell_the_style():
    assert reasoning_style_of("<|start|>assistant<|channel|>analysis<|message|>").name == "harmony"
