"""Scores of calls and of JSON, on answers that are right, half right and wrong."""

from typing import Any

import pytest

from workers.builtin.call_scores import Example, judge, score
from workers.builtin.tokenizer import Call, Conversation, Message

_TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
_ASKED = Message("user", "Weather in Oslo?")


def _example(*calls: Call) -> Example:
    answer = Message("assistant", "" if calls else "None.", calls)
    return Example("calls", Conversation((_ASKED, answer), (_TOOL,)))


def _text(*calls: str) -> str:
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls) + "<|im_end|>"


_OSLO = _example(Call("weather", {"city": "Oslo"}))
_RIGHT = '{"name": "weather", "arguments": {"city": "Oslo"}}'
_OTHER = '{"name": "weather", "arguments": {"city": "Rome"}}'


@pytest.mark.parametrize(
    ("text", "name", "call"),
    [
        (_text(_RIGHT), True, True),
        (_text(_OTHER), True, False),
        (_text('{"name": "time", "arguments": {"city": "Oslo"}}'), False, False),
        (_text(_RIGHT, _RIGHT), False, False),
        (_text('{"name": "weather", '), False, False),
        (_text("[]"), False, False),
        ("It is cold.<|im_end|>", False, False),
    ],
)
def test_a_call_is_right_by_its_name_and_by_its_arguments(
    text: str, name: bool, call: bool
) -> None:
    assert judge(_OSLO, text) == {"right_name": name, "right_call": call}


def test_an_answer_without_calls_is_right_where_none_was_wanted() -> None:
    assert judge(_example(), "I cannot.<|im_end|>") == {"right_name": True, "right_call": True}
    assert judge(_example(), _text(_RIGHT)) == {"right_name": False, "right_call": False}


@pytest.mark.parametrize(
    ("text", "valid", "right"),
    [
        ('{"a": 1}<|im_end|>', True, True),
        ('{"a":1}', True, True),
        ('{"a": 2}<|im_end|>', True, False),
        ('{"a": ', False, False),
    ],
)
def test_json_is_right_whatever_its_spaces(text: str, valid: bool, right: bool) -> None:
    answer = Message("assistant", '{"a": 1}')
    example = Example("JSON", Conversation((Message("user", "a is 1"), answer)))
    assert judge(example, text) == {"valid": valid, "right": right}


def test_shares_are_by_kind_and_prompts_end_where_the_assistant_begins() -> None:
    examples = [_OSLO, _OSLO, _example()]
    scores = score(examples, [_text(_RIGHT), _text(_OTHER), "No."])
    assert scores == {"calls": {"num": 3, "right_name": 1.0, "right_call": 2 / 3}}
    assert _OSLO.prompt.endswith("Weather in Oslo?<|im_end|>\n<|im_start|>assistant\n")
