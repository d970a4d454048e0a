"""Requests that an API server refuses by itself are counted, each once and by its code."""

import asyncio
import dataclasses

import grpc
import httpx
import pytest
import pytest_asyncio

from service.api.grpc import SERVICE_NAME, build_grpc_server
from service.api.http import build_http_app
from service.errors import ERROR_TABLE
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from service.security.callers import ANONYMOUS

pytestmark = pytest.mark.asyncio
JSON = {"content-type": "application/json"}
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 1}
TEXT = pb.Text(text="hi")


class OneKey:
    """An Authenticator."""

    def identify(self, authorization):
        return ANONYMOUS if authorization == "Bearer secret" else None


def rejections(bench):
    return [call[1] for call in bench.metrics.calls if call[0] == "rejected"]


def closed_client(services):
    app = build_http_app(dataclasses.replace(services, authenticator=OneKey()))
    return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://tessera")


@pytest_asyncio.fixture
async def dial(services):
    opened = []

    async def start(**changes):
        server, port = build_grpc_server(dataclasses.replace(services, **changes), "127.0.0.1:0")
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        opened.append((server, channel))
        return channel

    yield start
    for server, channel in opened:
        await channel.close()
        await server.stop(None)


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"]
)
@pytest.mark.parametrize(
    ("content", "headers", "code"),
    [
        (b"{", JSON, "invalid_json"),
        (b"{}", {"content-type": "text/plain"}, "unsupported_media_type"),
        (b"[]", JSON, "invalid_request"),
        (b"x" * (9 << 20), JSON, "payload_too_large"),
    ],
    ids=["json", "media", "form", "size"],
)
async def test_a_refused_body_is_counted_once(client, bench, path, content, headers, code):
    response = await client.post(path, content=content, headers=headers)
    assert response.json()["error"]["code"] == code
    assert rejections(bench) == [code]


async def test_a_body_that_grows_too_large_is_counted_once(client, bench):
    limit = bench.handler.limits.max_body_bytes

    async def chunks():
        for _ in range(limit // (1 << 20) + 1):
            yield b" " * (1 << 20)

    response = await client.post("/v1/completions", content=chunks(), headers=JSON)
    assert response.status_code == 413
    assert rejections(bench) == ["payload_too_large"]


@pytest.mark.parametrize(
    ("extra", "code"),
    [({"seed": 2**64}, "invalid_request"), ({"model": "other"}, "model_not_found")],
    ids=["before the handler", "by the handler"],
)
async def test_a_refused_parameter_is_counted_once_whoever_refuses_it(client, bench, extra, code):
    await client.post("/v1/completions", json=COMPLETION | extra)
    assert rejections(bench) == [code]


@pytest.mark.parametrize(
    ("method", "path", "body", "code"),
    [
        ("GET", "/v1/models/other", None, "model_not_found"),
        ("GET", "/v1/nothing", None, "route_not_found"),
        ("DELETE", "/v1/completions", None, "method_not_allowed"),
        ("POST", "/tokenize", {"model": "other", "prompt": "x"}, "model_not_found"),
        ("POST", "/tokenize", {"prompt": "x", "messages": []}, "invalid_request"),
        ("POST", "/detokenize", {"model": "other", "tokens": [5]}, "model_not_found"),
        ("POST", "/detokenize", {"tokens": [10**6]}, "invalid_request"),
    ],
)
async def test_what_no_generation_refuses_is_counted_once(client, bench, method, path, body, code):
    response = await client.request(method, path, json=body)
    assert response.json()["error"]["code"] == code
    assert rejections(bench) == [code]


async def test_every_code_that_is_counted_is_one_of_the_table(client, bench):
    """So a client cannot make up series."""
    for path in ("/x/1", "/x/2", "/v1/models/a", "/v1/models/b"):
        await client.get(path)
    assert set(rejections(bench)) <= {code.value for code in ERROR_TABLE}
    assert len(set(rejections(bench))) == 2


async def test_a_missing_key_is_counted_and_a_good_one_and_health_are_not(services, bench):
    async with closed_client(services) as client:
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 401
        assert (await client.get("/nowhere")).status_code == 401
        assert rejections(bench) == ["invalid_api_key"] * 2
        headers = {"authorization": "Bearer secret"}
        answer = await client.post("/v1/completions", json=COMPLETION, headers=headers)
        assert answer.status_code == 200
        assert (await client.get("/health/live")).status_code == 200
    assert rejections(bench) == ["invalid_api_key"] * 2


async def test_a_service_that_is_not_ready_is_no_refused_request(services, bench):
    app = build_http_app(dataclasses.replace(services, is_ready=lambda: False))
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        assert (await client.get("/health/ready")).status_code == 503
    assert rejections(bench) == []


async def counted(bench, codes):
    """A gRPC client may know of its call's end before the call has ended here."""
    for _ in range(200):
        if len(rejections(bench)) >= len(codes):
            break
        await asyncio.sleep(0.005)
    assert rejections(bench) == codes


async def failure_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return raised.value.code()


async def test_a_grpc_call_without_a_key_is_counted_once(dial, bench):
    stub = pb_grpc.InferenceStub(await dial(authenticator=OneKey()))
    for call in (
        stub.Generate(pb.GenerateRequest(text=TEXT)),
        stub.GenerateStream(pb.GenerateRequest(text=TEXT)).read(),
        stub.ListModels(pb.ListModelsRequest()),
    ):
        assert await failure_of(call) is grpc.StatusCode.UNAUTHENTICATED
    await counted(bench, ["invalid_api_key"] * 3)


@pytest.mark.parametrize("rpc", ["Generate", "Tokenize", "ListModels"])
async def test_bytes_that_are_no_message_are_counted_once(dial, bench, rpc):
    channel = await dial()
    call = channel.unary_unary(f"/{SERVICE_NAME}/{rpc}")(b"\xff\xff\xff")
    assert await failure_of(call) is grpc.StatusCode.INVALID_ARGUMENT
    await counted(bench, ["invalid_request"])


@pytest.mark.parametrize("rpc", ["Generate", "GenerateStream"])
@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (pb.GenerateRequest(), "invalid_request"),
        (pb.GenerateRequest(text=TEXT, model="other"), "model_not_found"),
        (pb.GenerateRequest.FromString(b"\xf8\x07\x01"), "unknown_parameter"),
    ],
    ids=["before the handler", "by the handler", "fields"],
)
async def test_a_refused_message_is_counted_once(dial, bench, rpc, request_, code):
    call = getattr(pb_grpc.InferenceStub(await dial()), rpc)(request_)
    await failure_of(call.read() if rpc == "GenerateStream" else call)
    await counted(bench, [code])


@pytest.mark.parametrize(
    ("rpc", "request_", "code"),
    [
        ("GetModel", pb.GetModelRequest(), "invalid_request"),
        ("GetModel", pb.GetModelRequest(name="other"), "model_not_found"),
        ("Tokenize", pb.TokenizeRequest(model="other", text=TEXT), "model_not_found"),
        ("Tokenize", pb.TokenizeRequest(), "invalid_request"),
        ("Detokenize", pb.DetokenizeRequest(token_ids=[10**6]), "invalid_request"),
        ("Embed", pb.EmbedRequest(input=[pb.EmbedInput()]), "invalid_request"),
        (
            "Embed",
            pb.EmbedRequest(model="other", input=[pb.EmbedInput(text=TEXT)]),
            "model_not_found",
        ),
    ],
)
async def test_a_refused_message_of_another_method_is_counted_once(
    dial, bench, rpc, request_, code
):
    await failure_of(getattr(pb_grpc.InferenceStub(await dial()), rpc)(request_))
    await counted(bench, [code])


async def test_a_method_that_does_not_exist_is_counted_once(dial, bench):
    channel = await dial()
    call = channel.unary_unary(f"/{SERVICE_NAME}/Nothing")(b"")
    assert await failure_of(call) is grpc.StatusCode.UNIMPLEMENTED
    await counted(bench, ["route_not_found"])
