"""Quotas and admission are asked before a body is read; what fails gives its place back."""

import asyncio
import dataclasses

import grpc
import httpx
import pytest

from service.api.auth import make_authenticator
from service.api.grpc import SERVICE_NAME, build_grpc_server
from service.api.http import build_http_app
from service.errors import ApiError
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.callers import callers_of
from tests.fakes.wire_server import Server

pytestmark = pytest.mark.asyncio
HEADERS = {"authorization": "Bearer a", "content-type": "application/json"}
METADATA = (("authorization", "Bearer a"),)
EMBED_INPUT = pb.EmbedInput(text=pb.Text(text="hi"))
PATHS = ["/v1/completions", "/v1/chat/completions"]
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 2}


@pytest.fixture
def limited(services):
    """A service whose key has no room for a second request."""
    callers = callers_of("a", max_concurrent_requests=1)
    return dataclasses.replace(services, authenticator=make_authenticator(callers))


def use_up(services):
    """Take the key's only place; returns its lease."""
    return services.authenticator.identify("Bearer a").quota.admit()


async def answer_to_head(app, path):
    """The status and body of the answer to a request whose body must not be asked for."""

    async def receive():
        raise AssertionError("the body was read")

    messages = []

    async def send(message):
        messages.append(message)

    headers = [(k.encode(), v.encode()) for k, v in HEADERS.items()]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": headers,
        "query_string": b"",
    }
    await app(scope, receive, send)
    return messages[0]["status"], b"".join(m.get("body", b"") for m in messages[1:])


@pytest.mark.parametrize(
    "path",
    [
        *PATHS,
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/embeddings",
        "/tokenize",
        "/detokenize",
        "/models/tiny/v1/completions",
    ],
)
async def test_a_key_without_room_is_refused_unread_over_http(limited, path):
    app = build_http_app(limited)
    use_up(limited)
    status, body = await answer_to_head(app, path)
    assert (status, b'"rate_limited"' in body) == (429, True)


@pytest.mark.parametrize(
    "path", [*PATHS, "/v1/messages", "/v1/score", "/models/tiny/v1/completions"]
)
async def test_a_full_service_refuses_unread_over_http(limited, bench, path):
    bench.backend.is_full = True
    status, body = await answer_to_head(build_http_app(limited), path)
    assert (status, b'"overloaded"' in body) == (529 if "messages" in path else 429, True)


@pytest.mark.parametrize("rpc", ["Generate", "GenerateStream", "Embed", "Tokenize", "Detokenize"])
async def test_a_key_without_room_is_refused_unread_over_grpc(limited, rpc):
    use_up(limited)
    assert await end_of_silent_call(limited, rpc) == "rate_limited"


@pytest.mark.parametrize("rpc", ["Generate", "GenerateStream", "Embed"])
async def test_a_full_service_refuses_unread_over_grpc(limited, bench, rpc):
    bench.backend.is_full = True
    assert await end_of_silent_call(limited, rpc) == "overloaded"


async def end_of_silent_call(services, rpc):
    """How a call ends whose client sends no message."""
    server, port = build_grpc_server(services, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(f"/{SERVICE_NAME}/{rpc}")(metadata=METADATA)
        async with asyncio.timeout(5):
            trailers = dict(await call.trailing_metadata())
    await server.stop(None)
    return trailers["tessera-error-code"]


async def test_the_refusal_arrives_while_the_body_is_under_way_and_the_connection_ends_well(
    limited,
):
    use_up(limited)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer a\r\n"
        b"Content-Type: application/json\r\nContent-Length: 100000\r\n\r\n"
    )
    async with Server(build_http_app(limited)) as server, asyncio.timeout(10):
        reader, writer = await server.connect(head, b"x" * 50_000)
        answer = await reader.readuntil(b"rate_limited")
        assert answer.startswith(b"HTTP/1.1 429 ")
        # The rest is thrown away, and the connection serves on.
        writer.write(
            b"x" * 50_000 + b"GET /health/live HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
        )
        rest = await reader.read()
        assert b"HTTP/1.1 200 OK" in rest
        writer.close()
        await server.until_empty()


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/v1/completions", b"{"),
        ("/v1/completions", b'{"prompt": "x", "model": "other"}'),
        ("/v1/completions", b'{"prompt": "x", "n": 100000}'),
        ("/v1/chat/completions", b"[]"),
        ("/tokenize", b"{"),
        ("/tokenize", b'{"prompt": "x", "model": "other"}'),
        ("/tokenize", b'{"prompt": "x"}'),
        ("/detokenize", b'{"tokens": [9999999]}'),
        ("/detokenize", b'{"tokens": [5]}'),
    ],
)
async def test_every_http_request_gives_its_place_back(limited, path, content):
    transport = httpx.ASGITransport(app=build_http_app(limited))
    async with httpx.AsyncClient(
        transport=transport, base_url="http://tessera", headers=HEADERS
    ) as client:
        for _ in range(3):
            assert (await client.post(path, content=content)).status_code != 429
        assert (await client.post("/v1/completions", json=COMPLETION)).status_code == 200


async def test_every_grpc_call_gives_its_place_back(limited, bench):
    server, port = build_grpc_server(limited, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(text=pb.Text(text="hi"))
        for call in (
            lambda: channel.unary_unary(f"/{SERVICE_NAME}/Generate")(b"\xff", metadata=METADATA),
            lambda: stub.Generate(pb.GenerateRequest(), metadata=METADATA),
            lambda: stub.Tokenize(pb.TokenizeRequest(), metadata=METADATA),
            lambda: stub.Tokenize(pb.TokenizeRequest(text=pb.Text(text="hi")), metadata=METADATA),
            lambda: stub.Detokenize(pb.DetokenizeRequest(token_ids=[5]), metadata=METADATA),
            lambda: stub.Embed(pb.EmbedRequest(), metadata=METADATA),
            lambda: stub.Embed(pb.EmbedRequest(input=[EMBED_INPUT]), metadata=METADATA),
        ):
            await asyncio.gather(call(), return_exceptions=True)
            await until_free(limited)
        silent = channel.stream_stream(f"/{SERVICE_NAME}/Generate")(metadata=METADATA)
        await silent.initial_metadata()
        silent.cancel()
        await until_free(limited)
        await stub.Generate(request, metadata=METADATA)
        await until_free(limited)
    await server.stop(None)


async def until_free(services):
    for _ in range(200):
        try:
            use_up(services).end(0)
        except ApiError:
            await asyncio.sleep(0.01)
        else:
            return
    pytest.fail("a place was never given back")
