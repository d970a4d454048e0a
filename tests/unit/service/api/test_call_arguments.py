"""Arguments of calls as objects: whole ones as they are, what there is of others."""

import json

import pytest

from service.api.call_arguments import object_part
from service.api.openai.json_parts import MAX_CHARS, JsonParts


def written(arguments):
    parts = JsonParts()
    return b"".join(parts.pieces({"input": object_part(arguments, parts)}))


@pytest.mark.parametrize("text", ['{"a": "é\\u0000", "b": [1e400]}', ' {"a":{"a": 1}} ', "{}"])
def test_what_is_whole_is_written_as_it_is(text):
    assert written(text) == b'{"input":%b}' % text.strip().encode()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": "b', {"a": "b"}),
        ('{"a": [1, 2', {"a": [1, 2]}),
        ("{", {}),
        ("", {}),
        ("[1]", {}),
        ('{"a": 1} and more', {"a": 1}),
        ("{]", {}),
        ("{" * 10_000, {}),
    ],
)
def test_what_was_cut_is_what_there_is_of_it(text, expected):
    assert json.loads(written(text))["input"] == expected


@pytest.mark.parametrize("end", ['"}', ""])
def test_large_arguments_are_whole_or_their_beginning(end):
    text = '{"a": "' + "é" * MAX_CHARS
    value = json.loads(written(text + end))["input"]["a"]
    assert value == "é" * (MAX_CHARS if end else MAX_CHARS - len('{"a": "'))
