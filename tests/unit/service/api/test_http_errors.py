"""Every error of the HTTP API has OpenAI's shape, its own code, and the right status."""

import dataclasses
import json

import grpc
import httpx
import pytest

from service.api.auth import make_authenticator
from service.api.grpc_status import GRPC_STATUS
from service.api.http import build_http_app
from service.errors import (
    ERROR_TABLE,
    ApiError,
    ApiErrorCode,
    from_output_error,
    from_rejection,
)
from service.limits import Limits
from tests.fakes.backend import FakeStream, make_outputs
from tests.fakes.callers import callers_of
from tests.fakes.text import make_bench
from workers.engine.protocol import OutputError
from workers.errors import ErrorCode, RequestRejectedError

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "tiny", "prompt": "hi"}


def _client(app):
    transport = httpx.ASGITransport(app=app)
    return httpx.AsyncClient(transport=transport, base_url="http://tessera")


def _assert_error(response, status, code, param=None):
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (response.status_code, error["code"], error["param"]) == (status, code, param)
    assert error["message"]
    assert response.headers["x-request-id"]


@pytest.mark.parametrize("code", list(ApiErrorCode))
def test_every_code_has_a_row(code):
    assert 400 <= ERROR_TABLE[code].http_status < 600
    assert GRPC_STATUS[code] is not grpc.StatusCode.OK


@pytest.mark.parametrize("code", list(ErrorCode))
def test_every_engine_error_has_a_code_for_clients(code):
    assert from_rejection(RequestRejectedError(code, "m", "p")).param == "p"
    assert from_output_error(OutputError(code, "m")).code in ERROR_TABLE


@pytest.mark.parametrize("code", list(ApiErrorCode))
def test_only_errors_that_may_pass_say_when_to_come_back(code):
    may_pass = ERROR_TABLE[code].http_status in (429, 503)
    assert (ApiError(code, "m").retry_after_s is not None) == may_pass


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nowhere", 404, "route_not_found"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/health/live", 405, "method_not_allowed"),
        ("POST", "/v1/completions//", 404, "route_not_found"),
        ("GET", "/v1/models/none", 404, "model_not_found"),
        ("GET", "/docs", 404, "route_not_found"),
    ],
)
async def test_routes_that_do_not_exist(client, method, path, status, code):
    response = await client.request(method, path)
    _assert_error(response, status, code, "model" if code == "model_not_found" else None)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b'{"prompt": "\\ud800"}', "invalid_json"),
        (b"[" * 60_000, "invalid_json"),
        (b"[]", "invalid_request"),
        (b"null", "invalid_request"),
    ],
)
async def test_bodies_that_are_no_request(client, path, body, code):
    response = await client.post(path, content=body, headers={"content-type": "application/json"})
    _assert_error(response, 400, code)


@pytest.mark.asyncio
async def test_only_json_is_accepted(client):
    response = await client.post("/v1/completions", content=json.dumps(COMPLETION))
    _assert_error(response, 415, "unsupported_media_type")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("extra", "code", "param"),
    [
        ({"bogus": 1}, "unknown_parameter", "bogus"),
        ({"stream_options": {"x": 1}, "stream": True}, "unknown_parameter", "stream_options.x"),
        ({"model": "other"}, "model_not_found", "model"),
        ({"temperature": "1"}, "invalid_request", "temperature"),
        ({"temperature": 2.5}, "invalid_request", "temperature"),
        ({"top_p": 0}, "invalid_request", "top_p"),
        ({"n": True}, "invalid_request", "n"),
        ({"n": 9}, "limit_exceeded", "n"),
        ({"n": 10**30}, "limit_exceeded", "n"),
        ({"seed": 2**64}, "invalid_request", "seed"),
        ({"logit_bias": {"x": 1}}, "invalid_request", "logit_bias"),
        ({"logit_bias": {"1": 101}}, "invalid_request", "logit_bias"),
        ({"stop": [""]}, "invalid_request", "stop"),
        ({"stop": ["x"] * 17}, "limit_exceeded", "stop"),
        ({"stop_token_ids": [-1]}, "invalid_request", "stop_token_ids.0"),
        ({"stream_options": {"include_usage": True}}, "invalid_request", "stream_options"),
        ({"stream": True, "prompt_logprobs": 1}, "invalid_request", "prompt_logprobs"),
        ({"service_tier": "priority"}, "unsupported_parameter", "service_tier"),
        ({"best_of": 1, "n": 2}, "invalid_request", "best_of"),
        ({"best_of": 9}, "limit_exceeded", "best_of"),
        ({"best_of": 2, "stream": True}, "invalid_request", "best_of"),
        ({"best_of": True}, "invalid_request", "best_of"),
        ({"n": 1.5}, "invalid_request", "n"),
        ({"store": True}, "unsupported_parameter", "store"),
        ({"chat_template": "{{ 1 }}"}, "unsupported_parameter", "chat_template"),
        ({"use_beam_search": True, "stop": "x"}, "invalid_request", "use_beam_search"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_bad_parameters_are_named(client, bench, path, extra, code, param):
    base = CHAT if "chat" in path else COMPLETION
    response = await client.post(path, json={**base, **extra})
    _assert_error(response, 404 if code == "model_not_found" else 400, code, param)
    assert bench.backend.requests == []


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("/v1/completions", {"max_tokens": 0}, "invalid_request", "max_tokens"),
        ("/v1/completions", {"tools": [{}]}, "unsupported_parameter", "tools"),
        ("/v1/completions", {"max_tokens": 600}, "context_length_exceeded", "max_tokens"),
        ("/v1/completions", {"prompt": []}, "limit_exceeded", "prompt"),
        ("/v1/completions", {"prompt": ""}, "invalid_request", "prompt"),
        ("/v1/completions", {"prompt": [1, "x"]}, "invalid_request", "prompt"),
        ("/v1/completions", {"logprobs": 21}, "limit_exceeded", "logprobs"),
        ("/v1/chat/completions", {"echo": True}, "unknown_parameter", "echo"),
        ("/v1/chat/completions", {"messages": []}, "limit_exceeded", "messages"),
        ("/v1/chat/completions", {"top_logprobs": 1}, "invalid_request", "top_logprobs"),
        (
            "/v1/chat/completions",
            {"max_tokens": 5, "max_completion_tokens": 6},
            "invalid_request",
            "max_tokens",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "function", "content": "x", "name": "f"}]},
            "unsupported_parameter",
            "messages.role",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
            "unsupported_parameter",
            "messages.content",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
            "invalid_request",
            "messages.0.tool_calls.0.function",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x", "extra": 1}]},
            "unknown_parameter",
            "messages.0.extra",
        ),
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"a": 10**40}},
            "invalid_request",
            "chat_template_kwargs",
        ),
        (
            "/v1/chat/completions",
            {"chat_template_kwargs": {"a": "x" * 20_000}},
            "limit_exceeded",
            "chat_template_kwargs",
        ),
        ("/tokenize", {"messages": CHAT["messages"]}, "invalid_request", "prompt"),
        ("/detokenize", {"tokens": [420]}, "invalid_request", "tokens"),
    ],
)
async def test_bad_parameters_of_one_route(client, path, body, code, param):
    base = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT, "/tokenize": COMPLETION}
    response = await client.post(path, json={**base.get(path, {}), **body})
    _assert_error(response, 400, code, param)


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_values_that_ask_for_nothing_pass(client, path):
    harmless = {
        "tools": [],
        "tool_choice": "none",
        "parallel_tool_calls": True,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "reasoning_effort": None,
        "store": False,
        "best_of": 1,
        "user": "me",
        "metadata": {"a": "b"},
        "service_tier": "auto",
        "logit_bias": None,
        "functions": None,
        "use_beam_search": False,
        "spaces_between_special_tokens": True,
    }
    base = CHAT if "chat" in path else COMPLETION
    assert (await client.post(path, json={**base, **harmless})).status_code == 200


@pytest.mark.asyncio
async def test_text_parts_names_and_developers_are_honoured(client, bench):
    messages = [
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": [{"type": "text", "text": t} for t in ("a", "b")]},
        {"role": "assistant", "content": None, "tool_calls": None, "refusal": None},
    ]
    response = await client.post("/v1/chat/completions", json={**CHAT, "messages": messages})
    assert response.status_code == 200
    prompt = bench.tokenizer.encoder.decode(
        bench.backend.requests[0].prompt_token_ids, skip_special_tokens=False
    )
    assert prompt == (
        "<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\na\nb<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.asyncio
async def test_tokenize_and_detokenize(client):
    response = await client.post(
        "/tokenize", json={"prompt": "naïve 🙂", "return_token_strs": True}
    )
    body = response.json()
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["max_model_len"] == 512
    back = await client.post("/detokenize", json={"tokens": body["tokens"]})
    assert back.json() == {"prompt": "naïve 🙂"}
    chat = await client.post("/tokenize", json={"messages": CHAT["messages"]})
    assert chat.json()["count"] > 3


@pytest.mark.asyncio
async def test_request_ids_are_kept_if_well_formed_and_replaced_if_not(client):
    response = await client.post(
        "/v1/completions", json=COMPLETION, headers={"x-request-id": "my-id.1"}
    )
    assert response.headers["x-request-id"] == "my-id.1"
    assert response.json()["id"] == "cmpl-my-id.1"
    for bad in ("x" * 129, "a b", "a,b"):
        response = await client.get("/health/live", headers={"x-request-id": bad})
        assert response.headers["x-request-id"] != bad


@pytest.mark.asyncio
async def test_bodies_are_read_only_up_to_the_ceiling(services, tmp_path):
    bench = make_bench(tmp_path / "small", limits=Limits(max_body_bytes=2048))
    app = build_http_app(dataclasses.replace(services, models=bench.models))
    num_sent = 0

    async def chunks():
        nonlocal num_sent
        for _ in range(1000):
            num_sent += 1
            yield b"x" * 1024

    headers = {"content-type": "application/json"}
    async with _client(app) as client:
        declared = await client.post("/v1/completions", content=b"x" * 4096, headers=headers)
        _assert_error(declared, 413, "payload_too_large")
        chunked = await client.post("/v1/completions", content=chunks(), headers=headers)
        _assert_error(chunked, 413, "payload_too_large")
    assert num_sent < 10


@pytest.mark.asyncio
async def test_keys_are_wanted_on_every_path_but_health(services):
    keys = make_authenticator(callers_of("first", "second"))
    async with _client(build_http_app(dataclasses.replace(services, authenticator=keys))) as client:
        for path in ("/v1/models", "/openapi.json", "/nowhere", "/health/live//", "/load", "//"):
            for authorization in (None, "Bearer", "Bearer wrong", "Basic first", "first"):
                headers = {} if authorization is None else {"authorization": authorization}
                response = await client.get(path, headers=headers)
                _assert_error(response, 401, "invalid_api_key")
                assert response.headers["www-authenticate"] == "Bearer"
        for key in ("first", "second"):
            response = await client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
            assert response.status_code == 200
        assert (await client.get("/health/live")).status_code == 200


@pytest.mark.asyncio
async def test_readiness_is_told_apart_from_liveness(services):
    app = build_http_app(dataclasses.replace(services, is_ready=lambda: False))
    async with _client(app) as client:
        assert (await client.get("/health/live")).status_code == 200
        response = await client.get("/health/ready")
        _assert_error(response, 503, "unavailable")
        assert int(response.headers["retry-after"]) >= 1


@pytest.mark.asyncio
@pytest.mark.parametrize("path", ["/health", "/ping"])
async def test_health_as_the_peers_have_it_is_open_empty_and_follows_readiness(
    services, bench, path
):
    keyed = dataclasses.replace(services, authenticator=make_authenticator(callers_of("key")))
    async with _client(build_http_app(keyed)) as client:
        answer = await client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
    loading = dataclasses.replace(keyed, is_ready=lambda: False)
    async with _client(build_http_app(loading)) as client:
        _assert_error(await client.get(path), 503, "unavailable")
    assert bench.metrics.calls == []


@pytest.mark.asyncio
async def test_a_model_card_has_what_clients_of_the_peers_read(client):
    (card,) = (await client.get("/v1/models")).json()["data"]
    assert (card["id"], card["root"], card["parent"]) == ("tiny", "org/tiny", None)
    assert (card["object"], card["max_model_len"], card["ready"]) == ("model", 512, True)
    (permission,) = card["permission"]
    assert permission["object"] == "model_permission"
    assert permission["allow_sampling"] is True
    assert permission["allow_fine_tuning"] is False
    assert permission["created"] == card["created"]


@pytest.mark.asyncio
async def test_a_bug_is_a_typed_error_that_tells_nothing(services, bench):
    def explode(request):
        raise RuntimeError("secret detail")

    bench.backend.script = explode
    transport = httpx.ASGITransport(app=build_http_app(services), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        response = await client.post("/v1/completions", json=COMPLETION)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (500, "internal")
    assert "secret" not in response.text


@pytest.mark.asyncio
async def test_a_bug_within_a_stream_ends_it_with_a_typed_error(services, bench):
    class Broken(FakeStream):
        async def __anext__(self):
            if not self._outputs:
                raise RuntimeError("secret detail")
            return self._outputs.pop(0)

    async def submit(request, context):
        return Broken(make_outputs(request, [4, 5, 6])[:2], None)

    bench.backend.submit = submit
    transport = httpx.ASGITransport(app=build_http_app(services))
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        response = await client.post("/v1/completions", json={**COMPLETION, "stream": True})
    events = [line[6:] for line in response.text.split("\n\n") if line]
    assert len(events) == 3
    assert json.loads(events[-1])["error"]["code"] == "internal"
    assert "secret" not in response.text


@pytest.mark.asyncio
async def test_the_openapi_document_describes_every_body(client):
    document = (await client.get("/openapi.json")).json()
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize"} <= set(document["paths"])
    properties = document["components"]["schemas"]["CompletionRequest"]["properties"]
    assert {"prompt", "max_tokens", "top_k", "cache_salt"} <= set(properties)
