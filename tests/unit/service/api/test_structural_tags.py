"""structural_tag: what the grammar made of it allows, in both fields, and what is refused."""

import json
from bisect import bisect_left

import pytest
from llguidance import LLMatcher, LLTokenizer
from pydantic import ValidationError

from service.api.openai.completions import CompletionRequest
from service.errors import ApiError
from service.tokenizer.grammars import GrammarMaker

BYTES = LLTokenizer("byte")
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TAG = {
    "structures": [
        {"begin": "<function=weather>", "schema": SCHEMA, "end": "</function>"},
        {"begin": "<function=time>", "schema": {"type": "object"}, "end": "</function>"},
        {"begin": "[[", "schema": {"enum": ["a::=b", 2]}, "end": "]]"},
    ],
    "triggers": ["<function=", "[["],
}
ASKED = {
    "response_format": {"response_format": {"type": "structural_tag", **TAG}},
    "structured_outputs": {"structured_outputs": {"structural_tag": TAG}},
    "its_text": {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
}


def request_of(fields):
    return CompletionRequest.model_validate({"model": "m", "prompt": "hi", **fields})


def allows(grammar: str, text: str) -> bool:
    matcher = LLMatcher(BYTES, grammar, log_level=0)
    return matcher.consume_tokens(BYTES.tokenize_str(text)) and matcher.is_accepting()


@pytest.mark.parametrize("name", ASKED)
def test_what_follows_a_trigger_obeys_and_other_text_is_free(name) -> None:
    named = request_of(ASKED[name]).constraint
    grammar = GrammarMaker().make(named.constraint)
    assert named.param == (
        "response_format" if name == "response_format" else "structured_outputs.structural_tag"
    )
    for text in (
        "just text, {no} [schema] < anywhere",
        'Let me see: <function=weather>{"city": "Berlin"}</function> and then',
        '[["a::=b"]] or [[2]] or <function=time>{"x": [1]}</function>',
    ):
        assert allows(grammar, text), text
    for text in (
        "<function=unknown>{}</function>",
        '<function=weather>{"town": "Berlin"}</function>',
        '<function=weather>{"city": "Berlin"} and no end',
        "text [[3]]",
    ):
        assert not allows(grammar, text), text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"triggers": ["{"]}, "no trigger begins"),
        ({"triggers": []}, "at least 1"),
        ({"triggers": [""]}, "must not be empty"),
        ({"structures": []}, "at least 1"),
        ({"structures": [{"begin": "[[", "schema": "[1", "end": ""}]}, "must be JSON"),
        ({"format": {"type": "any_text"}}, "format"),
    ],
)
@pytest.mark.parametrize("field", ["response_format", "structured_outputs"])
def test_what_is_no_tag_is_refused(field, changes, message) -> None:
    tag = {**TAG, **changes}
    inner = (
        {"type": "structural_tag", **tag} if field == "response_format" else {"structural_tag": tag}
    )
    with pytest.raises((ValidationError, ApiError), match=message):
        request_of({field: inner})


def test_structures_need_their_type() -> None:
    with pytest.raises(ApiError, match="needs response_format.type structural_tag"):
        request_of({"response_format": {"type": "text", "triggers": ["a"]}})


MIB = 1 << 20
LARGE = {
    "a list in the tag's text": '{"triggers":["a"],"structures":[' + "1," * (4 * MIB // 2) + "1]}",
    "a list in a schema's text": {
        "triggers": ["a"],
        "structures": [{"begin": "a", "schema": '{"enum":[' + "1," * (2 * MIB) + "1]}", "end": ""}],
    },
    "many values in few bytes": '{"triggers":[' + "1," * 500_000 + '1],"structures":[]}',
    "a long text in a schema": {
        "triggers": ["a"],
        "structures": [{"begin": "a", "schema": {"title": "x" * (6 * MIB)}, "end": ""}],
    },
    "a long text": {
        "triggers": ["a"],
        "structures": [{"begin": "a", "schema": {}, "end": "x" * (6 * MIB)}],
    },
}


@pytest.mark.parametrize("name", LARGE)
def test_what_would_hold_the_interpreter_for_long_is_refused_by_its_size(name, monkeypatch) -> None:
    monkeypatch.setattr(json, "loads", lambda text: pytest.fail("it was parsed"))
    monkeypatch.setattr(json, "dumps", lambda value, **_: pytest.fail("it was written"))
    with pytest.raises(ValidationError, match="may have at most"):
        request_of({"structured_outputs": {"structural_tag": LARGE[name]}})


def refusal_of(depth: int) -> str:
    schema = '{"a":' * depth + "1" + "}" * depth
    tag = {"triggers": ["a"], "structures": [{"begin": "a", "schema": schema, "end": ""}]}
    try:
        request_of({"structured_outputs": {"structural_tag": tag}})
    except ValidationError as error:
        return str(error)
    return ""


def test_a_schema_of_any_depth_is_taken_or_refused() -> None:
    """Some can be read and not be written: at which depth says the stack that is left."""
    depths = range(100, 1100)
    deepest = bisect_left(depths, True, key=lambda depth: refusal_of(depth) != "")
    around = range(depths[deepest] - 20, depths[deepest] + 20)
    refusals = [refusal_of(depth) for depth in around]
    assert not refusals[0]
    assert any("nested too deeply" in refusal for refusal in refusals)
    assert "must be JSON" in refusals[-1]
    assert not refusal_of(depths[0])
    assert "must be JSON" in refusal_of(depths[-1])
    assert "may have at most" in refusal_of(100_000)
