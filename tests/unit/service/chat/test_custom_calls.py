"""Calls in a form that an operator describes, by a template or a regular expression."""

import json
import time

import jsonschema
import pytest
from pydantic import ValidationError

from service.chat.constraints import ChatGrammars
from service.chat.options import ChatOptions, Tool
from service.chat.settings import ChatSettings
from service.chat.tools.custom import CustomToolCalls
from service.chat.tools.grammar import UnwritableSchemaError
from service.tokenizer.constraints import JsonSchema
from tests.unit.service.chat.test_tool_grammars import TOOLS as STRICT
from tests.unit.service.chat.test_tool_grammars import written_at_random
from tests.unit.service.chat.test_tool_parsers import PARIS, QUOTED, TOOLS, cuts, joined

TEMPLATE = CustomToolCalls(template="<call f={name}>{arguments}</call>")
PATTERN = CustomToolCalls(
    begin="((", end="))", pattern=r"\s*(?P<name>\w+)\s*(?:with (?P<arguments>.*))?"
)
CASES = {
    "template": (
        TEMPLATE,
        f"I look. <call f=get_weather>{QUOTED}</call>\n<call f=now>{{}}</call> So.",
        "I look.So.",
        [("get_weather", PARIS), ("now", {})],
    ),
    "pattern": (
        PATTERN,
        f"I look. ((get_weather with {json.dumps(PARIS)})) ((now)) So.",
        "I look.So.",
        [("get_weather", PARIS), ("now", {})],
    ),
    "no function": (TEMPLATE, "<call f=unknown>{}</call>", "<call f=unknown>{}</call>", []),
    "no arguments": (TEMPLATE, "<call f=now>[]</call>", "<call f=now>[]</call>", []),
    "no match": (PATTERN, "((a b c)) x", "((a b c)) x", []),
    "no JSON": (PATTERN, "((now with {)) x", "((now with {)) x", []),
    "no end": (PATTERN, "((now with {}", "((now with {}", []),
}


def read(calls, pieces):
    parser = calls.to_parser()(TOOLS, lambda: "id", is_parallel=True)
    return joined([*map(parser.push, pieces), parser.flush()])


@pytest.mark.parametrize("case", CASES)
def test_calls_are_read_however_the_text_is_cut(case):
    described, text, content, calls = CASES[case]
    whole = read(described, [text])
    assert whole[0] == content
    assert [(name, json.loads(arguments)) for _, name, arguments in whole[1]] == calls
    for pieces in cuts(text):
        assert read(described, pieces) == whole


def grammars(described):
    parser = described.to_parser()
    return ChatGrammars(parser, parser.syntax(""), None, {})


def test_what_a_template_describes_can_be_forced():
    made = grammars(TEMPLATE).of_calls(ChatOptions(STRICT, "required"), is_open=False)
    schemas = {tool.name: tool.parameters for tool in STRICT}
    for seed in range(5):
        parser = TEMPLATE.to_parser()(
            {tool.name: tool for tool in STRICT}, lambda: "id", is_parallel=True
        )
        content, calls = joined([parser.push(written_at_random(made, seed)), parser.flush()])
        assert content == ""
        assert calls
        for _, name, arguments in calls:
            jsonschema.validate(json.loads(arguments), schemas[name])


def test_what_a_regular_expression_describes_cannot():
    made = grammars(PATTERN)
    for options in (ChatOptions(STRICT, "required"), ChatOptions(STRICT, "auto")):
        with pytest.raises(UnwritableSchemaError):
            made.of_calls(options, is_open=False)
    with pytest.raises(UnwritableSchemaError):
        made.of_answer(JsonSchema("{}"), ChatOptions(STRICT, "auto"), is_open=False)
    free = ChatOptions((Tool("now", {"type": "object"}),), "auto")
    assert made.of_calls(free, is_open=False) is None


@pytest.mark.parametrize(
    "described",
    [
        {},
        {"template": "{name}{arguments}"},
        {"template": "<a>{arguments}b{name}"},
        {"template": "<a>{name} {name} {arguments}"},
        {"template": "<a>{name} {arguments}", "begin": "x"},
        {"begin": "(", "end": ")"},
        {"begin": "(", "end": ")", "pattern": "("},
        {"begin": "(", "end": ")", "pattern": "(?P<name>a)"},
    ],
)
def test_a_description_that_tells_nothing_is_refused_at_the_start(described):
    with pytest.raises(ValidationError):
        CustomToolCalls(**described)


def test_a_description_and_the_parsers_name_need_each_other():
    with pytest.raises(ValidationError):
        ChatSettings(tool_call_parser="custom")
    with pytest.raises(ValidationError):
        ChatSettings(custom_tool_calls=TEMPLATE)
    assert ChatSettings(tool_call_parser="custom", custom_tool_calls=TEMPLATE)


@pytest.mark.parametrize(
    ("pattern", "inner"),
    [
        (r'.*name="(?P<name>.*)".*args=(?P<arguments>.*)\.', 'name="' * 2000),
        (r"(?P<name>(a|aa)+)\|(?P<arguments>.*)", "a" * 60),
    ],
)
def test_a_pattern_that_a_text_makes_slow_holds_nobody_up(pattern, inner, caplog):
    described = CustomToolCalls(begin="((", end="))", pattern=pattern)
    text = f"(({inner}))" * 20
    started_s = time.thread_time()
    content, calls = read(described, [text])
    assert time.thread_time() - started_s < 1.0
    assert (content, calls) == (text, [])
    assert len(caplog.records) == 1
