"""Per-key limits and salts as clients meet them, over HTTP and gRPC, down to the backend."""

import asyncio
import dataclasses

import grpc
import httpx
import pytest
import pytest_asyncio

from service.api.auth import OpenAuthenticator, make_authenticator
from service.api.errors import ApiError, ApiErrorCode
from service.api.grpc import build_grpc_server
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.callers import callers_of
from tests.fakes.text import make_bench

pytestmark = pytest.mark.asyncio


@pytest.fixture
def bench(tmp_path):
    return make_bench(tmp_path)


@pytest.fixture
def services(bench):
    return ApiServices(bench.models, OpenAuthenticator(), lambda: True, "0", 0, peek_s=0.2)


def keyed(services, *keys, **limits):
    return dataclasses.replace(
        services, authenticator=make_authenticator(callers_of(*keys, **limits))
    )


def http_client(services, key):
    transport = httpx.ASGITransport(app=build_http_app(services))
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=transport, base_url="http://tessera", headers=headers)


async def complete(client, **fields):
    return await client.post("/v1/completions", json={"model": "tiny", "prompt": "hi", **fields})


@pytest_asyncio.fixture
async def serve_grpc():
    opened = []

    async def serve(services):
        server, port = build_grpc_server(services, "127.0.0.1:0")
        await server.start()
        channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
        opened.append((server, channel))
        return pb_grpc.InferenceStub(channel)

    yield serve
    for server, channel in opened:
        await channel.close()
        await server.stop(None)


def metadata(key):
    return (("authorization", f"Bearer {key}"),)


async def test_http_refuses_with_429_and_retry_after_and_other_keys_go_on(services):
    limited = keyed(services, "a", "b", requests_per_minute=2)
    async with http_client(limited, "a") as a, http_client(limited, "b") as b:
        assert [(await complete(a)).status_code for _ in range(2)] == [200, 200]
        refused = await complete(a)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limited"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert 1 <= int(refused.headers["retry-after"]) <= 30
        assert (await a.post("/tokenize", json={"prompt": "hi"})).status_code == 429
        assert (await a.get("/v1/models")).status_code == 200
        assert (await complete(b)).status_code == 200


async def test_grpc_refuses_with_resource_exhausted_and_retry_after(services, serve_grpc):
    stub = await serve_grpc(keyed(services, "a", "b", requests_per_minute=1))
    request = pb.GenerateRequest(text=pb.Text(text="hi"))
    await stub.Generate(request, metadata=metadata("a"))
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Generate(request, metadata=metadata("a"))
    trailers = dict(raised.value.trailing_metadata())
    assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert trailers["tessera-error-code"] == "rate_limited"
    assert 1 <= int(trailers["retry-after"]) <= 60
    await stub.Generate(request, metadata=metadata("b"))


async def test_prompt_and_output_tokens_both_count(services):
    limited = keyed(services, "a", tokens_per_minute=10)
    async with http_client(limited, "a") as client:
        usage = (await complete(client)).json()["usage"]
        assert usage["total_tokens"] > 10
        refused = await complete(client)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 6 * (usage["total_tokens"] - 10)


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_ended_request_gives_its_place_back(services, is_stream):
    limited = keyed(services, "a", max_concurrent_requests=1)
    async with http_client(limited, "a") as client:
        for _ in range(3):
            assert (await complete(client, stream=is_stream)).status_code == 200


async def test_a_failed_start_gives_its_place_back(services, bench):
    async def fail(request):
        raise ApiError(ApiErrorCode.UNAVAILABLE, "no replica")

    limited = keyed(services, "a", max_concurrent_requests=1)
    async with http_client(limited, "a") as client:
        working, bench.backend.submit = bench.backend.submit, fail
        assert [(await complete(client)).status_code for _ in range(2)] == [503, 503]
        bench.backend.submit = working
        assert (await complete(client)).status_code == 200


async def test_a_stream_under_way_holds_its_place_until_it_or_its_client_ends(
    services, bench, serve_grpc
):
    stub = await serve_grpc(keyed(services, "a", max_concurrent_requests=1))
    request = pb.GenerateRequest(text=pb.Text(text="hi"))
    bench.backend.gate = asyncio.Semaphore(1)
    stream = stub.GenerateStream(request, metadata=metadata("a"))
    await stream.read()
    with pytest.raises(grpc.aio.AioRpcError, match="under way"):
        await stub.Generate(request, metadata=metadata("a"))
    stream.cancel()
    bench.backend.gate = None
    for _ in range(100):
        try:
            await stub.Generate(request, metadata=metadata("a"))
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.02)
        else:
            return
    pytest.fail("the place of a cancelled stream was never given back")


@pytest.mark.parametrize("salts", [False, True])
async def test_keys_share_cached_prefixes_unless_salted_apart(services, bench, serve_grpc, salts):
    salted = keyed(services, "a", "b", salt_prefix_cache=salts)
    stub = await serve_grpc(salted)
    for key in "ab":
        async with http_client(salted, key) as client:
            await complete(client)
            await complete(client, cache_salt="own")
        await stub.Generate(pb.GenerateRequest(text=pb.Text(text="hi")), metadata=metadata(key))
    seen = [request.cache_salt for request in bench.backend.requests]
    assert seen[2] == seen[0]
    assert seen[5] == seen[3]
    assert len(set(seen)) == (4 if salts else 2)
    if not salts:
        assert set(seen) == {"", "own"}
