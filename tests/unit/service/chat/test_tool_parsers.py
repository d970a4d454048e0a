"""Every family's parser: the same calls whatever the cuts, and no text is ever lost."""

import itertools
import json
import random

import pytest

from service.chat.options import Tool
from service.chat.parsed import ParsedText
from service.chat.tools.families import FAMILIES, family_of
from service.chat.tools.values import argument_json

WEATHER = Tool(
    "get_weather",
    {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "units": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
    },
)
TOOLS = {tool.name: tool for tool in (WEATHER, Tool("now", {"type": "object", "properties": {}}))}
PARIS = {"city": 'Paris, "é" }]>', "days": 3}
QUOTED = json.dumps(PARIS, ensure_ascii=False)
V3_CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n" + QUOTED + "\n```"
    "<｜tool▁call▁end｜>"
)
# name of the family, text, content, calls.
CALLS = {
    "hermes": (
        "hermes",
        'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": '
        f"{QUOTED}}}\n</tool_call>\n"
        '<tool_call>{"arguments": {}, "id": "x", "name": "now"}</tool_call>\n',
        "Let me see.",
        [("get_weather", PARIS), ("now", {})],
    ),
    "hermes without an end": (
        "hermes",
        f'<tool_call>{{"name": "get_weather", "arguments": {QUOTED}}}<tool_call>'
        '{"name": "now", "arguments": {}}',
        "",
        [("get_weather", PARIS), ("now", {})],
    ),
    "hermes and text": (
        "hermes",
        '<tool_call>{"name": "now", "arguments": {"a": [1, -2.5e3, true, null, {"b": []}]}}'
        "</tool_call> That was it. ",
        "That was it. ",
        [("now", {"a": [1, -2.5e3, True, None, {"b": []}]})],
    ),
    "llama": (
        "llama3_json",
        f' {{"name": "get_weather", "parameters": {QUOTED}}}; '
        '{"name": "now", "parameters": {}}',
        "",
        [("get_weather", PARIS), ("now", {})],
    ),
    "llama with its tag": (
        "llama3_json",
        '<|python_tag|>{"type": "function", "name": "now", "parameters": {}}',
        "",
        [("now", {})],
    ),
    "granite": (
        "granite",
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {QUOTED}}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [("get_weather", PARIS), ("now", {})],
    ),
    "mistral": (
        "mistral",
        f'[TOOL_CALLS] [{{"name": "get_weather", "arguments": {QUOTED}}}, '
        '{"name": "now", "arguments": {}}]',
        "",
        [("get_weather", PARIS), ("now", {})],
    ),
    "mistral, later": (
        "mistral",
        f"Sure.[TOOL_CALLS]get_weather[ARGS]{QUOTED}[TOOL_CALLS]now[CALL_ID]abc123def[ARGS]{{}}",
        "Sure.",
        [("get_weather", PARIS), ("now", {})],
    ),
    "pythonic": (
        "pythonic",
        "[get_weather(city='Paris, \"é\" }]>', days=3), now()]",
        "",
        [("get_weather", PARIS), ("now", {})],
    ),
    "pythonic, JSON's values": (
        "pythonic",
        '<|python_start|>[now(a=[1, "x)"], b={"c": None}, c=true, d=-1.5)]<|python_end|>',
        "",
        [("now", {"a": [1, "x)"], "b": {"c": None}, "c": True, "d": -1.5})],
    ),
    "deepseek v3": (
        "deepseek_v3",
        f"Well.\n<｜tool▁calls▁begin｜>{V3_CALL}\n{V3_CALL}<｜tool▁calls▁end｜>",
        "Well.",
        [("get_weather", PARIS), ("get_weather", PARIS)],
    ),
    "deepseek v3.1": (
        "deepseek_v3",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{QUOTED}"
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "",
        [("get_weather", PARIS), ("now", {})],
    ),
    "qwen3 coder": (
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n7\nor </p> 8\n"
        "</parameter>\n<parameter=days>\n3\n</parameter>\n<parameter=units>\nnull\n</parameter>\n"
        '<parameter=tags>\n["a"]\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n'
        "<function=now>\n</function>\n</tool_call>",
        "I look.",
        [
            ("get_weather", {"city": "7\nor </p> 8", "days": 3, "units": None, "tags": ["a"]}),
            ("now", {}),
        ],
    ),
    "kimi": (
        "kimi_k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{QUOTED}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|> {}<|tool_call_end|><|tool_calls_section_end|>",
        "I look.",
        [("get_weather", PARIS), ("now", {})],
    ),
    "harmony": (
        "harmony",
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{QUOTED}<|call|><|start|>assistant<|channel|>commentary to=functions.now<|message|>{{}}",
        "",
        [("get_weather", PARIS), ("now", {})],
    ),
    "glm": (
        "glm4",
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>42</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>units</arg_key>\n"
        "<arg_value>metric</arg_value>\n</tool_call>\n<tool_call>now</tool_call>",
        "",
        [("get_weather", {"city": "42", "days": 3, "units": "metric"}), ("now", {})],
    ),
}
# Text that only looks like a call: all of it is content.
TEXTS = {
    "hermes": [
        "",
        " plain <b>text</b> \n",
        "<tool_call>no JSON</tool_call>",
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "now"}</tool_call>',
        '<tool_call>{"name": "now", "arguments": [1]}',
        '<tool_call>{"name": "now", "argu',
        "a <tool_c",
        "<tool_call>" + "[" * 300,
        " " * 700 + "x" + "\n" * 600,
    ],
    "llama3_json": ['{"name": "Bob", "age": 3}', '{"a": 1}', 'x {"name": "now", "parameters": {}}'],
    "granite": ["<|tool_call|>[]", "<|tool_call|>{}"],
    "mistral": ["[TOOL_CALLS] []", "[TOOL_CALLS] what?", "[TOOL_CALLS]unknown[ARGS]{}"],
    "pythonic": [" [", "[1, 2]", "[unknown(a=1)]", "[now]", "[", " [a](b)"],
    "deepseek_v3": ["<｜tool▁calls▁begin｜>x", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>[]"],
    "qwen3_coder": ["<tool_call>\n<function=unknown>\n</function>", "<function=", "<tool_call>{}"],
    "glm4": ["<tool_call>unknown\n</tool_call>", "<tool_call>"],
    "kimi_k2": [
        "<|tool_calls_section_begin|>x",
        "<|tool_call_begin|>functions.unknown:0<|tool_call_argument_begin|>{}",
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>[]",
    ],
    "harmony": ["<|channel|>commentary to=functions.unknown<|message|>{}", "<|channel|>x"],
}


def parser_of(family, **options):
    numbers = itertools.count()
    return FAMILIES[family](
        TOOLS, lambda: f"call_{next(numbers)}", **{"is_parallel": True, **options}
    )


def joined(parts):
    """Content and calls of all parts: what a client has in the end."""
    content, calls = "", {}
    for part in parts:
        content += part.content
        assert len({delta.index for delta in part.tool_calls}) == len(part.tool_calls)
        for delta in part.tool_calls:
            if delta.name:
                assert delta.index == len(calls)
                calls[delta.index] = [delta.id, delta.name, ""]
            else:
                assert not delta.id
            calls[delta.index][2] += delta.arguments
    return content, list(calls.values())


def read(family, pieces, **options):
    parser = parser_of(family, **options)
    return joined([*map(parser.push, pieces), parser.flush()])


def cuts(text):
    """All ways to cut it in two, every character by itself, and some at random."""
    yield from ([text[:i], text[i:]] for i in range(len(text) + 1))
    yield list(text)
    chance = random.Random(len(text))
    for _ in range(20):
        places = sorted(chance.choices(range(len(text) + 1), k=6))
        yield [text[a:b] for a, b in itertools.pairwise([0, *places, len(text)])]


@pytest.mark.parametrize("case", CALLS)
def test_calls_are_found(case):
    family, text, content, calls = CALLS[case]
    found_content, found = read(family, [text])
    assert found_content == content
    assert [(name, json.loads(arguments)) for _, name, arguments in found] == calls
    assert len({call_id for call_id, _, _ in found}) == len(calls)


@pytest.mark.parametrize("case", CALLS)
def test_cuts_change_nothing(case):
    family, text, _, _ = CALLS[case]
    whole = read(family, [text])
    assert all(read(family, pieces) == whole for pieces in cuts(text))


@pytest.mark.parametrize("case", CALLS)
def test_every_beginning_of_a_text_is_read_alike_however_it_is_cut(case):
    family, text, _, calls = CALLS[case]
    for end in range(len(text)):
        beginning = text[:end]
        whole = read(family, [beginning])
        assert read(family, list(beginning)) == whole
        assert [name for _, name, _ in whole[1]] == [name for name, _ in calls[: len(whole[1])]]


@pytest.mark.parametrize(("family", "text"), [(f, t) for f, texts in TEXTS.items() for t in texts])
def test_what_is_no_call_is_content(family, text):
    assert read(family, [text]) == (text, [])
    if len(text) < 200:
        assert all(read(family, pieces) == (text, []) for pieces in cuts(text))


def test_arguments_come_as_they_are_written():
    parser = parser_of("hermes")
    first = parser.push('<tool_call>{"name": "now", "arguments": {"a')
    assert [(d.index, d.name, d.arguments) for d in first.tool_calls] == [(0, "now", '{"a')]
    second = parser.push('": [1')
    assert [(d.name, d.id, d.arguments) for d in second.tool_calls] == [("", "", '": [1')]


def test_what_breaks_within_arguments_goes_on_as_content():
    text = '<tool_call>{"name": "now", "arguments": {"a": oops}}</tool_call>'
    content, ((_, name, arguments),) = read("hermes", [text])
    assert (name, arguments, content) == ("now", '{"a": ', "oops}}</tool_call>")


NOT_JSON = [
    '{"a": "\x01"}',
    '{"a": 01}',
    '{"a": 1.}',
    '{"a": -}',
    '{"a": tru}',
    '{"a": "\\x"}',
    '{"a": "\\u12g4"}',
    '{"a": [1,]}',
    '{"a": 1,}',
    '{"a" 1}',
    "{a: 1}",
    '{"a": [1}',
    '{"a":' * 200,
]


@pytest.mark.parametrize("arguments", NOT_JSON)
def test_what_is_not_json_is_never_whole_arguments(arguments):
    content, ((_, _, found),) = read(
        "hermes", [f'<tool_call>{{"name":"now","arguments":{arguments}']
    )
    assert found + content == arguments
    assert content
    with pytest.raises(json.JSONDecodeError):
        json.loads(found)


def test_half_of_a_surrogate_pair_is_no_value():
    content, ((_, _, found),) = read("pythonic", [r"[now(a='\ud800')]"])
    assert found + content
    (found + content).encode()


@pytest.mark.parametrize(
    ("schema", "raw", "value"),
    [
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "01234", "01234"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "12345", "12345"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "null", None),
        ({"type": ["string", "integer"]}, "12", 12),
        ({"type": ["string", "integer"]}, "1.5", "1.5"),
        ({"type": ["string", "number"]}, "-1", -1),
        ({"type": ["string", "boolean"]}, "True", True),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/a"}]}, "[1]", [1]),
        ({"anyOf": "x", "type": [5]}, "[1]", [1]),
        ({"type": "integer"}, "many", "many"),
        ({}, "{'a': (1, None)}", {"a": [1, None]}),
    ],
)
def test_a_value_is_what_the_schema_allows(schema, raw, value):
    assert json.loads(argument_json(raw, schema)) == value


def test_of_several_calls_only_the_first_is_told_to_who_wants_one():
    family, text, content, calls = CALLS["hermes"]
    found_content, found = read(family, [text], is_parallel=False)
    assert found_content == content
    assert [name for _, name, _ in found] == [calls[0][0]]


def test_a_call_that_is_cut_is_not_made_whole_by_one_that_nobody_is_told_of():
    parser = parser_of("hermes", is_parallel=False)
    parser.push('<tool_call>{"name": "now", "arguments": {"a": 1 oops')
    parser.push('<tool_call>{"name": "now", "arguments": {}}</tool_call>')
    assert parser.num_calls == 1
    assert not parser.is_whole


def test_a_call_of_kimis_keeps_the_id_that_its_results_are_told_by():
    text = CALLS["kimi"][1]
    _, calls = read("kimi_k2", [text])
    assert [call_id for call_id, *_ in calls] == ["functions.get_weather:0", "functions.now:1"]


def test_an_id_of_the_models_own_is_kept():
    _, found = read("mistral", [CALLS["mistral, later"][1]])
    assert found[1][0] == "abc123def"


def test_long_texts_take_time_in_proportion():
    parser = parser_of("hermes")
    text = "<tool_call> " * 5000 + "\n" * 50_000 + "<" * 50_000
    parts = [parser.push(text), parser.flush()]
    assert joined(parts)[0] == text


@pytest.mark.parametrize("family", FAMILIES)
def test_noise_is_read_alike_however_it_is_cut(family):
    chance = random.Random(family)
    samples = [text for name, text, _, _ in CALLS.values() if name == family]
    for _ in range(150):
        text = "".join(
            sample[start : start + chance.randrange(1, 40)]
            for sample in chance.choices(samples, k=4)
            for start in [chance.randrange(len(sample))]
        )
        assert read(family, [text]) == read(family, list(text))


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<tool_call> <function=f>", "qwen3_coder"),
        ("<tool_call> <arg_key>", "glm4"),
        ("[TOOL_CALLS]", "mistral"),
        ("<|tool_calls_section_begin|>", "kimi_k2"),
        ("<|start|>assistant<|channel|>final<|message|>", "harmony"),
        ("<|tool_call|> <tool_call>", "granite"),
        ("<｜tool▁calls▁begin｜>", "deepseek_v3"),
        ('{"name": function name, "parameters": dictionary}', "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
    ],
)
def test_templates_tell_the_family(template, family):
    assert family_of(template) is FAMILIES[family]


def test_a_template_that_tells_nothing_has_no_family():
    assert family_of("{{ messages }}") is None


def test_parsed_text_has_one_delta_a_call():
    parsed = ParsedText()
    parsed.add_call(0, "a", "f")
    parsed.add_arguments(0, "{")
    parsed.add_arguments(0, "}")
    assert [(d.id, d.arguments) for d in parsed.tool_calls] == [("a", "{}")]
