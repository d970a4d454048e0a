"""What Anthropic's Messages API refuses, by its name and in its own shape."""

import dataclasses

import httpx
import pytest

from service.api.anthropic.errors import ANTHROPIC_TABLE
from service.api.auth import make_authenticator
from service.api.http import build_http_app
from service.errors import ApiErrorCode
from service.limits import Limits
from tests.fakes.callers import callers_of
from tests.fakes.text import make_bench

pytestmark = pytest.mark.asyncio
USER = {"role": "user", "content": "hi"}
ASKED = {"model": "tiny", "max_tokens": 9, "messages": [USER]}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
IMAGE = {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}}
CALL = {"type": "tool_use", "id": "c", "name": "f", "input": {}}


def said(*blocks, role="user"):
    return {"messages": [{"role": role, "content": list(blocks)}, USER]}


def deep(depth):
    value = {}
    for _ in range(depth):
        value = {"a": value}
    return value


def result(content):
    return {"type": "tool_result", "tool_use_id": "c", "content": content}


REFUSED = {
    "an image": (said(IMAGE), "unsupported_parameter", "messages.content"),
    "an image of a tool": (said(result([IMAGE])), "unsupported_parameter", "messages.content"),
    "what was redacted": (
        said({"type": "redacted_thinking", "data": "x"}, role="assistant"),
        "unsupported_parameter",
        "messages.content",
    ),
    "a call of a user": (said(CALL), "invalid_request", "messages.content"),
    "a result of an assistant": (
        said(result("x"), role="assistant"),
        "invalid_request",
        "messages.content",
    ),
    "a last call": (
        {"messages": [USER, {"role": "assistant", "content": [CALL]}]},
        "invalid_request",
        "messages",
    ),
    "deep input": (
        said({**CALL, "input": deep(80)}, role="assistant"),
        "limit_exceeded",
        "messages.content.input",
    ),
    "an unknown name": ({"nonsense": 1}, "unknown_parameter", "nonsense"),
    "an unknown name of a block": (
        said({"type": "text", "text": "x", "nonsense": 1}),
        "unknown_parameter",
        "messages.0.content.0.text.nonsense",
    ),
    "citations": (
        said({"type": "text", "text": "x", "citations": [{}]}),
        "unsupported_parameter",
        "messages.content.citations",
    ),
    "a tool that would run here": (
        {"tools": [{"type": "web_search_20250305", "name": "web_search"}]},
        "unsupported_parameter",
        "tools.type",
    ),
    "a choice without tools": ({"tool_choice": {"type": "any"}}, "invalid_request", "tool_choice"),
    "a choice of no tool": (
        {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}},
        "invalid_request",
        "tool_choice",
    ),
    "a bad name": ({"tools": [{**TOOL, "name": "a b"}]}, "invalid_request", "tools.name"),
    "two tools of a name": ({"tools": [TOOL, TOOL]}, "invalid_request", "tools.name"),
    "a container": ({"container": "x"}, "unsupported_parameter", "container"),
    "a tier": ({"service_tier": "priority"}, "unsupported_parameter", "service_tier"),
    "no room for an answer": ({"max_tokens": 0}, "invalid_request", "max_tokens"),
    "a high temperature": ({"temperature": 3}, "invalid_request", "temperature"),
    "a priority": ({"priority": -1}, "limit_exceeded", "priority"),
    "no messages": ({"messages": []}, "limit_exceeded", "messages"),
    "another model": ({"model": "other"}, "model_not_found", "model"),
}


def check(response, status, error_type, code):
    body = response.json()
    assert response.status_code == status, body
    assert body["type"] == "error"
    assert body["request_id"] == response.headers["request-id"] == response.headers["x-request-id"]
    assert (body["error"]["type"], body["error"]["code"]) == (error_type, code)
    assert body["error"]["message"]
    return body["error"]


@pytest.mark.parametrize("name", REFUSED)
async def test_it_is_refused_by_its_name(client, bench, name):
    fields, code, param = REFUSED[name]
    response = await client.post("/v1/messages", json={**ASKED, **fields})
    row = ANTHROPIC_TABLE[ApiErrorCode(code)]
    assert check(response, row.http_status, row.error_type, code)["param"] == param
    assert bench.backend.requests == []


async def test_max_tokens_are_needed(client):
    response = await client.post("/v1/messages", json={"model": "tiny", "messages": [USER]})
    assert check(response, 400, "invalid_request_error", "invalid_request")["param"] == "max_tokens"


async def test_counting_takes_no_sampling(client):
    response = await client.post("/v1/messages/count_tokens", json=ASKED)
    check(response, 400, "invalid_request_error", "unknown_parameter")


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_control": {"type": "ephemeral", "ttl": "1h"}},
        {"metadata": {"user_id": "me"}},
        {"service_tier": "auto", "container": None, "mcp_servers": []},
        {"tools": [], "thinking": {"type": "disabled"}},
        {"output_config": {"effort": "max"}},
        {"tools": None, "system": "be kind", "stop_sequences": []},
    ],
)
async def test_what_asks_for_nothing_is_taken(client, fields):
    response = await client.post("/v1/messages", json={**ASKED, **fields})
    assert response.status_code == 200, response.text


async def test_every_code_has_a_row():
    assert set(ANTHROPIC_TABLE) == set(ApiErrorCode)


async def test_what_never_reaches_the_route_has_the_same_shape(services, tmp_path):
    bench = make_bench(tmp_path / "small", limits=Limits(max_body_bytes=2048))
    keys = make_authenticator(callers_of("first"))
    app = build_http_app(dataclasses.replace(services, models=bench.models, authenticator=keys))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}):
            response = await client.post("/v1/messages", json=ASKED, headers=headers)
            check(response, 401, "authentication_error", "invalid_api_key")
        known = {"x-api-key": "first"}
        for headers in (known, {"authorization": "Bearer first"}):
            response = await client.post("/v1/messages", json=ASKED, headers=headers)
            assert response.status_code == 200, response.text
        mixed = {"x-api-key": "first", "authorization": "Bearer wrong"}
        assert (await client.get("/v1/models", headers=mixed)).status_code == 401
        assert (await client.get("/v1/models", headers=known)).status_code == 200
        large = await client.post("/v1/messages", content=b"x" * 4096, headers=known)
        check(large, 413, "request_too_large", "payload_too_large")
        wrong = await client.get("/v1/messages", headers=known)
        check(wrong, 405, "invalid_request_error", "method_not_allowed")
        missing = await client.post("/v1/messages/batches", json={}, headers=known)
        check(missing, 404, "not_found_error", "route_not_found")
        text = await client.post("/v1/messages", content=b"{}", headers=known)
        check(text, 415, "invalid_request_error", "unsupported_media_type")


async def test_a_bug_tells_nothing(services, bench):
    def explode(request):
        raise RuntimeError("secret detail")

    bench.backend.script = explode
    transport = httpx.ASGITransport(app=build_http_app(services), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        response = await client.post("/v1/messages", json=ASKED)
    check(response, 500, "api_error", "internal")
    assert "secret" not in response.text
