"""Tools over HTTP: whatever is wrong is refused, and named."""

import pytest

from tests.fakes.chats import ASKED, TOOL, Told, call_of, make_told_bench, tool
from tests.fakes.tokenizer_folders import CHATML_TEMPLATE
from workers.builtin.tokenizer import CHAT_TEMPLATE

pytestmark = pytest.mark.asyncio


@pytest.fixture
def template():
    return CHAT_TEMPLATE


@pytest.fixture
def bench(tmp_path, template):
    return make_told_bench(tmp_path, Told(""), template)


REFUSED = {
    "unknown choice": (
        {"tool_choice": {"type": "function", "function": {"name": "x"}}},
        "tool_choice",
    ),
    "choice of nothing": ({"tool_choice": "required", "tools": []}, "tool_choice"),
    "no such choice": ({"tool_choice": "often"}, "tool_choice"),
    "no name": ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name"),
    "bad name": ({"tools": [tool(name='a"b')]}, "tools.function.name"),
    "same name": ({"tools": [TOOL, TOOL]}, "tools.function.name"),
    "no function": ({"tools": [{"type": "retrieval"}]}, "tools.0.type"),
    "no object": ({"tools": [tool(parameters={"type": "array"})]}, "tools.0.function.parameters"),
    "no schema": ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters"),
    "too many": ({"tools": [tool(name=f"f{i}") for i in range(4)]}, "tools"),
    "unfollowable": (
        {
            "tools": [tool(parameters={"type": "object", "properties": {"a": {"not": {}}}})],
            "tool_choice": "required",
        },
        "tool_choice",
    ),
    "too large": (
        {
            "tools": [tool(parameters={"type": "object", "title": "x" * 70_000})],
            "tool_choice": "required",
        },
        "tools",
    ),
    "a number": ({"tools": [tool(parameters={"maximum": 10**30})]}, "tools"),
    "two wishes": (
        {"tool_choice": "required", "response_format": {"type": "json_object"}},
        "response_format",
    ),
    "a pattern": ({"guided_regex": "a"}, "guided_regex"),
    "half of a character": ({"guided_json": '{"title": "\\ud800"}'}, "guided_json"),
    "effort": ({"reasoning_effort": "huge"}, "reasoning_effort"),
}


@pytest.mark.parametrize("case", REFUSED)
async def test_what_is_wrong_is_named(client, bench, case):
    fields, param = REFUSED[case]
    response = await client.post("/v1/chat/completions", json={**ASKED, **fields})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert bench.backend.requests == []


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages.tool_call_id"),
        ({"role": "user", "content": "x", "tool_call_id": "c"}, "messages.tool_call_id"),
        ({"role": "tool", "tool_call_id": "c"}, "messages.content"),
        ({"role": "user", "content": "x", "tool_calls": [CALL]}, "messages.tool_calls"),
        (call_of("{"), "messages.tool_calls.function.arguments"),
        (call_of('{"a": 100000000000000000000}'), "messages"),
        (call_of('{"a": "\\ud800"}'), "messages"),
        (call_of('{"a": [' + "1," * (1 << 18) + "1]}"), "messages.tool_calls.function.arguments"),
        (call_of("[]"), "messages.tool_calls.function.arguments"),
        (call_of('{"a":' * 90 + "1" + "}" * 90), "messages.tool_calls.function.arguments"),
        (call_of('{"a":' + "[" * 90_000), "messages.tool_calls.function.arguments"),
    ],
)
async def test_messages_of_tools_are_checked(client, bench, message, param):
    response = await client.post("/v1/chat/completions", json={**ASKED, "messages": [message]})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert bench.backend.requests == []


@pytest.mark.parametrize(
    "template", [CHATML_TEMPLATE, "{{ messages }}{{ tools }}", "{{ messages }}<tool_call>"]
)
async def test_a_model_without_tools_says_so(client, bench):
    response = await client.post("/v1/chat/completions", json=ASKED)
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (
        400,
        "unsupported_parameter",
        "tools",
    )
    response = await client.post("/v1/chat/completions", json={**ASKED, "tool_choice": "none"})
    assert response.status_code == 200
