"""Grammars of calls: what they let through, the family's parser reads, and it obeys the schema."""

import json
import random

import jsonschema
import pytest
from llguidance import LLMatcher, LLTokenizer

from service.chat.constraints import ChatGrammars
from service.chat.options import ChatOptions, Tool
from service.chat.reasoning import STYLES
from service.chat.tools.families import FAMILIES
from service.chat.tools.grammar import UnwritableSchemaError
from service.tokenizer.constraints import JsonSchema
from service.tokenizer.grammars import GrammarMaker

PLACE = {
    "type": "object",
    "properties": {
        "note": {"type": "string"},
        "size": {"$ref": "#/$defs/size"},
        "kind": {"type": "string", "enum": ["big", "<small>"]},
    },
    "required": ["kind", "size"],
    "additionalProperties": False,
    "$defs": {"size": {"type": "integer", "minimum": 0, "maximum": 99}},
}
FREE = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"type": "null"}}}
FREE["additionalProperties"] = False
TOOLS = (Tool("place", PLACE, True), Tool("free.one-2", FREE, True))
TEMPLATES = dict.fromkeys(FAMILIES, "") | {
    "mistral, later": "[ARGS]",
    "deepseek_v3, fenced": "```",
}
ENDS = [list(end) for end in (b"</arg_value>", b"\n</parameter>\n")]
BYTES = LLTokenizer("byte")


def grammars(case, style=None, token_ids=()):
    family = FAMILIES[case.partition(",")[0]]
    return ChatGrammars(family, family.syntax(TEMPLATES[case]), style, dict(token_ids))


def matcher_of(constraint):
    matcher = LLMatcher(BYTES, GrammarMaker().make(constraint))
    assert not matcher.is_error(), matcher.get_error()
    return matcher


def written_at_random(constraint, seed, num_bytes=4000):
    """A whole text that the grammar allows; short ones are likelier."""
    matcher, chance, made = matcher_of(constraint), random.Random(seed), []
    plain = [ord(c) for c in '", }])\n<>/ab10=:']
    while not matcher.is_stopped() and len(made) < num_bytes:
        end = chance.choice(ENDS)
        if chance.random() < 0.1 and matcher.validate_tokens(end) == len(end):
            assert matcher.consume_tokens(end)
            made += end
        if matcher.is_stopped():
            break
        mask = matcher.compute_bitmask()
        allowed = [i for i in range(256) if mask[i >> 3] >> (i & 7) & 1]
        if not allowed or (matcher.is_accepting() and chance.random() < 0.3):
            break
        liked = [i for i in allowed if i in plain] if chance.random() < 0.9 else allowed
        token = chance.choice(liked or allowed)
        assert matcher.consume_token(token), matcher.get_error()
        made.append(token)
    assert matcher.is_accepting()
    return bytes(made).decode("utf-8", "replace")


def read(case, text):
    parser = FAMILIES[case.partition(",")[0]](
        {tool.name: tool for tool in TOOLS}, lambda: "id", is_parallel=True
    )
    parts = [parser.push(text), parser.flush()]
    calls = {}
    for delta in (delta for part in parts for delta in part.tool_calls):
        calls.setdefault(delta.index, [delta.name, ""])[1] += delta.arguments
    return "".join(part.content for part in parts), list(calls.values())


def options(choice="required", *, is_parallel=True, tools=TOOLS):
    return ChatOptions(tools=tools, choice=choice, is_parallel=is_parallel)


def obey(calls):
    schemas = {tool.name: tool.parameters for tool in TOOLS}
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.parametrize("case", TEMPLATES)
@pytest.mark.parametrize("is_parallel", [True, False])
def test_forced_calls_are_calls_with_valid_arguments(case, is_parallel):
    constraint = grammars(case).of_calls(options(is_parallel=is_parallel), is_open=False)
    counts = set()
    for seed in range(6):
        content, calls = read(case, written_at_random(constraint, seed))
        assert content == ""
        obey(calls)
        counts.add(len(calls))
    assert min(counts) >= 1
    if not is_parallel:
        assert counts == {1}


def test_of_several_forced_calls_some_come_together():
    constraint = grammars("hermes").of_calls(options(), is_open=False)
    assert any(len(read("hermes", written_at_random(constraint, s))[1]) > 1 for s in range(20))


@pytest.mark.parametrize("case", ["hermes", "mistral", "llama3_json", "pythonic", "deepseek_v3"])
def test_a_strict_function_may_be_called_and_then_rightly(case):
    constraint = grammars(case).of_calls(options("auto"), is_open=False)
    forced = grammars(case).of_calls(options(), is_open=False)
    call = written_at_random(forced, 1)
    assert matcher_of(constraint).try_consume_tokens(list(call.encode())) == len(call.encode())
    words = b"No call at all."
    assert matcher_of(constraint).try_consume_tokens(list(words)) == len(words)
    wrong = call.replace("99", "x").replace("place", "palace").encode()
    assert call.encode() == wrong or (
        matcher_of(constraint).try_consume_tokens(list(wrong)) < len(wrong)
    )


def test_who_is_not_strict_writes_what_it_likes():
    tools = tuple(Tool(tool.name, tool.parameters) for tool in TOOLS)
    assert grammars("hermes").of_calls(options("auto", tools=tools), is_open=False) is None


def test_thinking_comes_first_where_the_prompt_has_begun_it():
    made = grammars("hermes", STYLES["think"])
    constraint = made.of_calls(options(is_parallel=False), is_open=True)
    text = (
        b'I <think so.\n</think>\n\n<tool_call>\n{"name": "free.one-2", "arguments": {"a": true}}'
    )
    assert matcher_of(constraint).try_consume_tokens(list(text)) == len(text)
    answer = made.of_answer(JsonSchema(json.dumps(FREE)), ChatOptions(), is_open=True)
    text = b'Hm.</think>{"a": true}'
    matcher = matcher_of(answer)
    assert matcher.try_consume_tokens(list(text)) == len(text)
    assert matcher.is_accepting()


def test_an_answer_to_a_schema_may_be_a_call_instead():
    made = grammars("hermes").of_answer(
        JsonSchema(json.dumps(FREE)), options("auto"), is_open=False
    )
    for text in (b'{"a": true}', b'<tool_call>\n{"name": "place", "arguments": {"size": 3, '):
        assert matcher_of(made).try_consume_tokens(list(text)) == len(text)
    assert matcher_of(made).try_consume_tokens(list(b"Hello")) == 0


def test_marks_that_are_tokens_are_asked_for_as_tokens():
    made = grammars("mistral", token_ids={"[TOOL_CALLS]": 300}).of_calls(options(), is_open=False)
    assert [(mark.text, mark.token_id) for mark in made.marks] == [("[TOOL_CALLS]", 300)]
    assert "<[300]>" in GrammarMaker().make(made)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object", "properties": {"a": {"type": "string", "pattern": "x"}}},
        {"type": "object", "anyOf": [{}]},
        {"type": "object", "required": ["a"]},
        {"type": "object", "required": 1},
        {"type": "object", "properties": {"a=b": {}}},
        {"type": "object", "properties": {f"a{i}": {} for i in range(100)}},
        {"type": "object", "properties": {"a": {"type": "string", "enum": [1]}}},
        {"type": "object", "properties": {"a": {"x-guidance": 1}}},
        {"type": "object", "properties": {"a": {"title": "\ud800"}}},
        # Its definitions would stand 64 times.
        {"$defs": {"a": {"const": "x" * 20_000}}, "properties": {f"a{i}": {} for i in range(64)}},
    ],
)
def test_what_a_format_cannot_hold_is_refused(schema):
    tools = (Tool("f", schema, True),)
    with pytest.raises(UnwritableSchemaError):
        grammars("qwen3_coder").of_calls(options(tools=tools), is_open=False)


THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize("thought", ["", THOUGHT])
def test_where_everything_is_a_message_thinking_may_come_before_calls_and_answers(thought):
    made = grammars("harmony", STYLES["harmony"])
    for choice in ("required", "auto"):
        constraint = made.of_calls(options(choice), is_open=False)
        call = written_at_random(grammars("harmony").of_calls(options(), is_open=False), 1)
        text = (thought + call).encode()
        assert matcher_of(constraint).try_consume_tokens(list(text)) == len(text)
        wrong = text.replace(b"functions.", b"functions.un")
        assert matcher_of(constraint).try_consume_tokens(list(wrong)) < len(wrong)
    said = f"{thought}{FINAL}Yes.".encode()
    assert matcher_of(constraint).try_consume_tokens(list(said)) == len(said)
    for tools in ((), TOOLS):
        asked = ChatOptions(tools, "auto")
        answer = made.of_answer(JsonSchema('{"type": "null"}'), asked, is_open=False)
        said = f"{thought}{FINAL}null".encode()
        assert matcher_of(answer).try_consume_tokens(list(said)) == len(said)
        wrong = f"{thought}{FINAL}nil".encode()
        assert matcher_of(answer).try_consume_tokens(list(wrong)) < len(wrong)
