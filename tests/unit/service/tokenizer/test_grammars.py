"""Grammars allow just what was asked for, as random texts of them show; the rest says why not."""

import json
import re

import jsonschema
import pytest

from service.tokenizer.constraints import (
    JSON_OBJECT,
    Choices,
    JsonSchema,
    Lark,
    Regex,
    constraint_bytes,
)
from service.tokenizer.grammars import GrammarMaker, GrammarRefusedError
from tests.fakes.grammar_texts import draw

SEEDS = range(12)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        "home": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/place"}]},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "$defs": {"place": {"type": "object", "properties": {"zip": {"pattern": "^\\d{5}$"}}}},
}
PERSON["$defs"]["place"]["additionalProperties"] = False
PERSON["$defs"]["place"]["properties"]["zip"]["type"] = "string"


@pytest.fixture(scope="module")
def maker():
    return GrammarMaker()


def schema(document, **options):
    return JsonSchema(json.dumps(document), **options)


def texts_of(maker, constraint):
    grammar = maker.make(constraint)
    return {draw(grammar, seed).decode() for seed in SEEDS}


def test_json_of_a_schema_is_valid_and_compact(maker):
    texts = texts_of(maker, schema(PERSON))
    assert len(texts) > 5
    for text in texts:
        value = json.loads(text)
        jsonschema.validate(value, PERSON)
        assert len(text) <= len(json.dumps(value, ensure_ascii=True)), text


def test_properties_come_in_the_order_of_the_schema(maker):
    document = {"type": "object", "properties": {"b": {"const": 1}, "a": {"const": 2}}}
    document |= {"required": ["a", "b"], "additionalProperties": False}
    assert [list(json.loads(text)) for text in texts_of(maker, schema(document))][0] == ["b", "a"]


def test_a_schema_can_allow_other_whitespace(maker):
    document = {"type": "array", "items": {"const": 1}, "maxItems": 2}
    document["x-guidance"] = {"whitespace_flexible": True, "whitespace_pattern": "\n"}
    assert any("\n" in text for text in texts_of(maker, schema(document)))


def test_some_json_object(maker):
    grammar = maker.make(JSON_OBJECT)
    assert all(draw(grammar, seed, 1 << 16)[:1] == b"{" for seed in range(3))


@pytest.mark.parametrize(
    "pattern",
    [r"\d{3}-\w{2,4}", "yes|no", "^a+b?$".replace("+", "{1,4}"), "a/b\nc", "[^\\d]\\D", "é{1,3}"],
)
def test_the_whole_text_matches_a_regular_expression(maker, pattern):
    for text in texts_of(maker, Regex(pattern)):
        assert re.fullmatch(pattern, text, re.ASCII), text


ODD = (
    "yes",
    "ye",
    'say "no"',
    "a/b|c",
    "back\\slash",
    "new\nline",
    "\x7f\u2028",
    "é🙂",
    "\x00",
    " ",
)


def test_choices_are_taken_to_the_letter_and_each_can_be(maker):
    grammar = maker.make(Choices(ODD))
    assert {draw(grammar, seed).decode() for seed in range(100)} == set(ODD)


@pytest.mark.parametrize(
    "source",
    ['start: "a" (op "a")?\nop: "+" | "-"', 'root ::= "a" (op "a")?\nop ::= "+" | "-"'],
    ids=["lark", "gbnf"],
)
def test_a_grammar_in_either_dialect(maker, source):
    assert texts_of(maker, Lark(source)) == {"a", "a+a", "a-a"}


def test_what_cannot_be_followed_is_ignored_where_the_client_says_so(maker):
    document = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "minProperties": 1}
    document |= {"not": {"const": 1}, "additionalProperties": False}
    with pytest.raises(GrammarRefusedError, match="not.*strict: false"):
        maker.make(schema(document))
    assert texts_of(maker, schema(document, is_lenient=True)) <= {
        "{}",
        *(f'{{"a":{space}{number}}}' for space in ("", " ") for number in (1, 2)),
    }


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        (JsonSchema("{"), "EOF"),
        (JsonSchema("[1]"), "a schema is a JSON object"),
        (schema({"type": "text"}), "Invalid type: text"),
        (schema({"type": "string", "format": "x"}), "Unknown format: x; leave it out"),
        (schema({"oneOf": [{"type": "integer"}, {"minimum": 2}]}), "coerce_one_of"),
        (schema({"$ref": "https://example.com/schema.json"}), "does not fetch"),
        (schema({"$ref": "file:///etc/passwd"}), "does not fetch"),
        (schema({"type": "integer", "minimum": 3, "maximum": 2}), "Unsatisfiable"),
        (schema({"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}), "no text at all"),
        (
            schema({"type": "object", "properties": {f"p{i}": {} for i in range(200)}}),
            "too many alternatives",
        ),
        (schema({"x-guidance": {"colour": 1}}), "unknown field `colour`"),
        (Regex("[a-z"), 'invalid regex "\\[a-z".*unclosed character class'),
        (Regex("(?=a)b"), "look-around"),
        (Regex("x" * 2000 + "("), r"xxx \.\.\. .*unclosed group"),
        (Lark("start: missing"), 'unknown name: "missing"'),
        (Lark("anything"), "neither Lark nor GBNF|Expected"),
        (Lark("root ::= missing"), "'missing' not found"),
        (Lark('start: <|tool|> "a"'), "tokens of a model"),
        (Lark('start: <[1-4]> "a"'), "tokens of a model"),
        (Lark("start: A\nA: /a+/ & /b+/"), "no text at all obeys it"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_had_says_why_on_one_short_line(maker, constraint, message):
    with pytest.raises(GrammarRefusedError, match=message) as raised:
        maker.make(constraint)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 700


def test_bytes_are_those_of_utf8():
    assert constraint_bytes(JsonSchema('{"é":1}')) == 8
    assert constraint_bytes(Regex("é")) == constraint_bytes(Lark("é")) == 2
    assert constraint_bytes(Choices(("é", "ab"))) == 4
