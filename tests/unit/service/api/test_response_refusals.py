"""What the Responses API refuses, by its name."""

import openai
import pytest

from service.api.responses.requests import LOGPROBS
from service.limits import Limits
from tests.fakes.text import make_bench
from workers.builtin.tokenizer import CHAT_TEMPLATE

pytestmark = pytest.mark.asyncio
USER = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
FORMAT = {"format": {"type": "json_object"}}
UNSUPPORTED, INVALID, LIMIT = "unsupported_parameter", "invalid_request", "limit_exceeded"


def said(*parts, role="user"):
    return {"input": [{"role": role, "content": list(parts)}, USER]}


def image(**more):
    return {"type": "input_image", "image_url": "data:image/png;base64,AAAA", **more}


def of_file(**more):
    return {"type": "input_file", "file_data": "x", **more}


REFUSED = {
    "a file": (said(of_file()), UNSUPPORTED, "input.content"),
    "an image of an assistant": (said(image(), role="assistant"), INVALID, "input.content"),
    "an image by its id": (said(image(file_id="f")), UNSUPPORTED, "input.file_id"),
    "an image of a tool": (
        {"input": [CALL, {"type": "function_call_output", "call_id": "c", "output": [image()]}]},
        UNSUPPORTED,
        "input.output",
    ),
    "a search": ({"input": [{"type": "web_search_call", "id": "x"}]}, UNSUPPORTED, "input"),
    "something encrypted": (
        {"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}, USER]},
        UNSUPPORTED,
        "input.encrypted_content",
    ),
    "annotations": (
        said({"type": "output_text", "text": "x", "annotations": [{}]}, role="assistant"),
        UNSUPPORTED,
        "input.annotations",
    ),
    "a result of no call": (
        {"input": [{"type": "function_call_output", "call_id": "d", "output": "x"}]},
        INVALID,
        "input.call_id",
    ),
    "arguments that are no object": (
        {"input": [{**CALL, "arguments": "[1]"}, USER]},
        INVALID,
        "input.arguments",
    ),
    "an unknown name": ({"messages": [USER]}, "unknown_parameter", "messages"),
    "a tool that runs here": ({"tools": [{"type": "web_search"}]}, UNSUPPORTED, "tools.type"),
    "a choice of such a tool": ({"tool_choice": {"type": "mcp"}}, UNSUPPORTED, "tool_choice"),
    "a choice without tools": ({"tool_choice": "required"}, INVALID, "tool_choice"),
    "a choice of no tool": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}},
        INVALID,
        "tool_choice",
    ),
    "two tools of one name": ({"tools": [TOOL, TOOL]}, INVALID, "tools.name"),
    "what would be lost": ({"background": True, "store": False}, INVALID, "background"),
    "a conversation": ({"conversation": "c"}, UNSUPPORTED, "conversation"),
    "a prompt of a server": ({"prompt": {"id": "p"}}, UNSUPPORTED, "prompt"),
    "truncation": ({"truncation": "auto"}, UNSUPPORTED, "truncation"),
    "several choices": ({"n": 2}, UNSUPPORTED, "n"),
    "the best of several": ({"best_of": 2}, UNSUPPORTED, "best_of"),
    "a chat's length": ({"max_tokens": 5}, UNSUPPORTED, "max_tokens"),
    "a chat's format": ({"response_format": {"type": "text"}}, UNSUPPORTED, "response_format"),
    "log probabilities of the prompt": ({"prompt_logprobs": 1}, UNSUPPORTED, "prompt_logprobs"),
    "alternatives of nothing": ({"top_logprobs": 2}, INVALID, "top_logprobs"),
    "something to include": ({"include": ["everything"]}, INVALID, "include.0"),
    "a short summary": (
        {"reasoning": {"summary": "concise"}},
        UNSUPPORTED,
        "reasoning.summary",
    ),
    "an effort": ({"reasoning": {"effort": "huge"}}, INVALID, "reasoning.effort"),
    "two constraints": (
        {"text": FORMAT, "structured_outputs": {"regex": "x"}},
        INVALID,
        "text.format",
    ),
    "a format and a forced call": (
        {"text": FORMAT, "tools": [TOOL], "tool_choice": "required"},
        INVALID,
        "text.format",
    ),
    "metadata": ({"metadata": {"k": "v" * 513}}, LIMIT, "metadata"),
    "a tier": ({"service_tier": "flex"}, UNSUPPORTED, "service_tier"),
    "obfuscation": (
        {"stream": True, "stream_options": {"include_obfuscation": True}},
        UNSUPPORTED,
        "stream_options.include_obfuscation",
    ),
    "something that was never stored": (
        {"previous_response_id": "resp_1"},
        "response_not_found",
        "previous_response_id",
    ),
    "too many items": ({"input": [USER] * 5}, LIMIT, "input"),
}


@pytest.fixture
def bench(tmp_path):
    return make_bench(tmp_path, limits=Limits(max_messages=4), chat_template=CHAT_TEMPLATE)


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_not_there_is_refused_by_its_name(client, bench, name):
    fields, code, param = REFUSED[name]
    answer = await client.post("/v1/responses", json={"model": "tiny", "input": "hi", **fields})
    error = answer.json()["error"]
    assert (error["code"], error["param"]) == (code, param), error
    assert answer.status_code == (404 if code == "response_not_found" else 400)
    assert bench.backend.requests == []


HARMLESS = {
    "background": False,
    "truncation": "disabled",
    "include": ["reasoning.encrypted_content", "file_search_call.results"],
    "conversation": None,
    "service_tier": "auto",
    "max_tool_calls": 3,
    "n": 1,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "prompt_cache_retention": "24h",
    "text": {"format": {"type": "text"}, "verbosity": "low"},
    "reasoning": {"effort": None, "context": "auto", "summary": "detailed"},
    "user": "me",
    "safety_identifier": "me",
    "top_logprobs": 0,
}


async def test_what_asks_for_nothing_is_taken(openai_client, client):
    for asked in ({name: value} for name, value in HARMLESS.items()):
        answer = await client.post("/v1/responses", json={"model": "tiny", "input": "hi", **asked})
        assert answer.status_code == 200, answer.text
    answer = await client.post("/v1/responses", json={"model": "tiny", "input": "hi", **HARMLESS})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("?stream=perhaps", "stream"),
        ("?include_obfuscation=true", "include_obfuscation"),
        ("?include=everything", "include.0"),
        ("?nothing=1", "nothing"),
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?order=up", "order"),
    ],
)
async def test_queries_are_read_strictly(openai_client, client, path, param):
    created = await openai_client.responses.create(model="tiny", input="hi")
    answer = await client.get(f"/v1/responses/{created.id}{path}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    with pytest.raises(openai.NotFoundError):
        await openai_client.responses.retrieve("resp_nothing", include=["file_search_call.results"])


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"include": [LOGPROBS], "top_logprobs": 21}, "top_logprobs"),
        ({"input": [{"role": "user", "content": "x"}] * 1025}, "input"),
    ],
)
async def test_parameters_are_named_as_they_were_written(client, asked, param):
    answer = await client.post("/v1/responses", json={"model": "tiny", "input": "hi", **asked})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
