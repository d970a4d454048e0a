"""structural_tag in vLLM's shape of formats: what their grammars allow, and what is refused."""

import json
import time

import pytest
from pydantic import ValidationError

from service.api.openai.parameters import from_validation_error
from service.api.openai.structural_formats import MAX_FORMAT_DEPTH, MAX_FORMATS
from service.errors import ApiError
from service.limits import MAX_GRAMMAR_BYTES
from service.tokenizer.grammars import GrammarMaker, GrammarRefusedError
from tests.unit.service.api.test_structural_tags import SCHEMA, allows, request_of

CITY = '{"city": "Rome"}'
WORD = {"type": "regex", "pattern": "[a-z/]+"}
ANY = {"type": "any_text"}
INT = {"type": "json_schema", "json_schema": {"type": "integer"}}
YES, NO = ({"type": "const_string", "value": value} for value in ("yes", "no"))
WEATHER = {
    "begin": "<f=weather>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</f>",
}
TIME = {"type": "tag", "begin": "<f=time>", "content": ANY, "end": ["</f>", "<end>"]}
CALL = f"<f=weather>{CITY}</f>"
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [WEATHER, TIME]}
SEPARATED = {"type": "tags_with_separator", "tags": [WEATHER, TIME], "separator": ", "}
THINKING = {"type": "tag", "begin": "<think>", "content": ANY, "end": "</think>"}


def sequence(*elements):
    return {"type": "sequence", "elements": list(elements)}


CASES = {
    "a text": (YES, ["yes"], ["no", "yes!"]),
    "anything": (ANY, ["", "x\n<f=y>"], []),
    "a schema": (INT, ["5"], ["x"]),
    "any json": ({"type": "json_schema", "json_schema": True}, ["[1]", '"x"'], ["x"]),
    "a pattern": (WORD, ["a/b"], ["A", ""]),
    "a pattern and a text behind": (sequence(WORD, {**NO, "value": "no."}), ["a/bno."], ["a/b"]),
    "one of two": ({"type": "or", "elements": [YES, INT]}, ["yes", "7"], ["no", "yes7"]),
    "text in sequence": (sequence(ANY, YES, INT), ["hm yes4", "yes4"], ["hm 4", "hm yes"]),
    "text before a tag": (
        sequence(ANY, {"type": "tag", **WEATHER}),
        [CALL, f"so: {CALL}"],
        ["so", f"{CALL} and", "<f=weather>5</f>"],
    ),
    "a sequence in a sequence": (
        sequence(ANY, sequence(YES, ANY), sequence(NO, YES)),
        ["a yes b noyes"],
        ["a yes b no"],
    ),
    "thinking, then triggered": (
        sequence(THINKING, TRIGGERED),
        ["<think>hm</think>", f"<think><f=</think>a {CALL} b"],
        [CALL, "<think>hm</think><f=weather>5</f>"],
    ),
    "triggered": (
        TRIGGERED,
        ["", "none < at all", f"a{CALL}b<f=time>now<end>c"],
        ["<f=other>", f"{CALL}<f=weather>"],
    ),
    "at least one": (TRIGGERED | {"at_least_one": True}, [f"a{CALL}", CALL * 2], ["", "a"]),
    "the first one": (TRIGGERED | {"stop_after_first": True}, ["a", f"a{CALL}"], [f"{CALL}b"]),
    "just one": (
        TRIGGERED | {"stop_after_first": True, "at_least_one": True},
        [CALL],
        ["a", CALL * 2],
    ),
    "separated": (
        SEPARATED,
        ["", CALL, f"{CALL}, {CALL}, <f=time><end>"],
        ["a", f"{CALL}{CALL}", f"{CALL}, "],
    ),
    "at least one separated": (SEPARATED | {"at_least_one": True}, [CALL], [""]),
    "the first separated": (
        SEPARATED | {"stop_after_first": True},
        ["", CALL],
        [f"{CALL}, {CALL}"],
    ),
    "tags in a tag": (
        {"type": "tag", "begin": "[", "content": TRIGGERED, "end": "]"},
        ["[]", f"[a{CALL}b]"],
        ["[", "[a]b", "[<f=other>]"],
    ),
    "a tag without an end": (sequence({**THINKING, "end": ""}, NO), ["<think>a no"], ["<think>a"]),
    "a tag with content that ends by itself": (
        sequence({"type": "tag", "begin": "(", "content": INT, "end": [")", "]"]}, YES),
        ["(5)yes", "(5]yes"],
        ["(5yes"],
    ),
}


def asked(form):
    return {"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": form}}}


@pytest.mark.parametrize("name", CASES)
def test_formats(name):
    form, good, bad = CASES[name]
    grammar = GrammarMaker().make(request_of(asked(form)).constraint.constraint)
    assert [text for text in good if not allows(grammar, text)] == []
    assert [text for text in bad if allows(grammar, text)] == []


def test_every_place_and_text_gives_the_same():
    tag = {"type": "structural_tag", "format": TRIGGERED}
    made = [
        request_of(fields).constraint.constraint
        for fields in (
            {"response_format": tag},
            {"structured_outputs": {"structural_tag": tag}},
            {"structured_outputs": {"structural_tag": json.dumps(tag)}},
        )
    ]
    assert made[0] == made[1] == made[2]


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (None, "valid dictionary|object"),
        ({}, "type"),
        ({"type": "grammar", "grammar": "x"}, "type"),
        ({"type": "any_text", "excludes": ["x"]}, "excludes"),
        ({"type": "json_schema", "json_schema": False}, "must be an object"),
        ({"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}, "style"),
        (sequence(), "at least 1"),
        (sequence(ANY, INT), "free text is followed by"),
        (sequence(ANY, ANY), "free text is followed by"),
        (sequence(ANY, {**YES, "value": ""}), "free text is followed by"),
        (TRIGGERED | {"triggers": ["<g="]}, "no trigger begins"),
        (TRIGGERED | {"triggers": [""]}, "no trigger begins"),
        ({"type": "const_string", "value": "x" * (6 << 20)}, "may have at most"),
        ({"type": "tag", "begin": {"token": 5}, "content": ANY, "end": ""}, "begin"),
    ],
)
def test_what_cannot_be_had_is_refused(form, message):
    with pytest.raises((ValidationError, ApiError), match=message):
        request_of(asked(form))


@pytest.mark.parametrize("pattern", ["(", "(?=a)", "a/b(", "\\"])
def test_a_pattern_that_is_none_is_refused(pattern):
    refused({**WORD, "pattern": pattern})


@pytest.mark.parametrize("form", [{**YES, "value": "\ud800"}, {**THINKING, "end": "\udfff"}])
def test_half_a_character_is_refused(form):
    refused(form)


def refused(form):
    constraint = request_of(asked(form)).constraint.constraint
    with pytest.raises(GrammarRefusedError):
        GrammarMaker().make(constraint)


def test_a_pattern_cannot_write_rules_of_its_own():
    breaking = "a/\nstart: /b"
    constraint = request_of(asked({**WORD, "pattern": breaking})).constraint.constraint
    grammar = GrammarMaker().make(constraint)
    assert allows(grammar, breaking)
    assert not allows(grammar, "b")


def test_floods_of_formats_are_refused_quickly():
    deep = ANY
    for _ in range(MAX_FORMAT_DEPTH):
        deep = sequence(deep)
    text = '{"type":"sequence","elements":[' * 300 + '{"type":"any_text"}' + "]}" * 300
    wide = sequence(*[YES] * MAX_FORMATS)
    tag = {"structured_outputs": {"structural_tag": f'{{"format":{text}}}'}}
    started_s = time.process_time()
    for fields in (asked(deep), asked(wide), asked(sequence(*[YES] * 100_000)), tag):
        with pytest.raises(ValidationError, match="at most 128 formats"):
            request_of(fields)
    assert time.process_time() - started_s < 1.0
    request_of(asked(deep["elements"][0]))
    request_of(asked(sequence(*[YES] * (MAX_FORMATS - 1))))


def test_what_is_wrong_is_named_as_it_was_written():
    with pytest.raises(ValidationError) as raised:
        request_of(asked(sequence(ANY, ANY)))
    error = from_validation_error(raised.value)
    assert error.param == "structured_outputs.structural_tag"
    assert error.message.startswith("structured_outputs.structural_tag: free text is followed by")
    with pytest.raises(ValidationError) as raised:
        request_of(asked({**YES, "value": 5}))
    param = from_validation_error(raised.value).param
    assert param == "structured_outputs.structural_tag.format.const_string.value"


def test_what_is_behind_many_formats_is_not_written_out_without_end():
    text = "\x7f" * (MAX_GRAMMAR_BYTES // 2)
    many = {"type": "or", "elements": [YES] * 100}
    started_s = time.process_time()
    for form in (
        {"type": "tag", "begin": "", "content": many, "end": text},
        sequence(many, {**YES, "value": text}),
        {
            "type": "triggered_tags",
            "triggers": ["<"] * 100,
            "tags": [{"begin": "<", "content": many, "end": text}],
        },
    ):
        with pytest.raises(ValidationError, match="makes a grammar of more than"):
            request_of(asked(form))
    assert time.process_time() - started_s < 0.5


def test_a_trigger_that_is_named_again_says_nothing_new():
    again = TRIGGERED | {"triggers": TRIGGERED["triggers"] * 2}
    made, wanted = (request_of(asked(form)).constraint.constraint for form in (again, TRIGGERED))
    assert made == wanted
