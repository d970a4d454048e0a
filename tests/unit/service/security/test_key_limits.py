"""Per-key limits and salts as clients meet them, over HTTP and gRPC, down to the backend."""

import asyncio
import dataclasses
import time

import grpc
import httpx
import pytest
import pytest_asyncio

from service.api.auth import OpenAuthenticator, make_authenticator
from service.api.grpc import build_grpc_server
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.config import parse_config
from service.errors import ApiError, ApiErrorCode
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from service.security.callers import make_callers
from tests.fakes.backend import make_outputs
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
    async def fail(request, context):
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


async def test_no_key_can_choose_the_salt_of_another(services, bench, serve_grpc):
    salted = keyed(services, "a", "b", salt_prefix_cache=True)
    stub = await serve_grpc(salted)
    async with http_client(salted, "a") as client:
        await complete(client)
        await complete(client, cache_salt="own")
    of_a = {request.cache_salt for request in bench.backend.requests}
    async with http_client(salted, "b") as client:
        for salt in (*of_a, *(salt.partition(":")[0] for salt in of_a), ":own", "own", ""):
            await complete(client, cache_salt=salt)
            text = pb.Text(text="hi")
            await stub.Generate(
                pb.GenerateRequest(text=text, cache_salt=salt), metadata=metadata("b")
            )
    seen = bench.backend.requests[2:]
    assert len(seen) == 14
    assert not of_a & {request.cache_salt for request in seen}


@pytest.mark.parametrize(("n", "num_prompts"), [(3, 1), (1, 3), (8, 64)])
async def test_more_sequences_than_a_key_may_ever_run_are_its_requests_fault(
    services, bench, serve_grpc, n, num_prompts
):
    limited = keyed(services, "a", max_concurrent_requests=2)
    async with http_client(limited, "a") as client:
        answer = await complete(client, prompt=["hi"] * num_prompts, n=n)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "limit_exceeded")
        assert bench.backend.requests == []
        assert (await complete(client, n=2)).status_code == 200
    if num_prompts == 1:
        stub = await serve_grpc(limited)
        request = pb.GenerateRequest(text=pb.Text(text="hi"), n=n)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Generate(request, metadata=metadata("a"))
        assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_sequences_under_way_leave_no_room_for_more_than_the_rest(services, bench):
    limited = keyed(services, "a", max_concurrent_requests=4)
    bench.backend.gate = asyncio.Semaphore(0)
    async with http_client(limited, "a") as client:
        running = asyncio.create_task(complete(client, n=3))
        async with asyncio.timeout(5):
            while bench.backend.num_live < 3:
                await asyncio.sleep(0.005)
        refused = await complete(client, n=2)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
        assert refused.headers["retry-after"] == "1"
        assert bench.backend.num_live == 3
        bench.backend.gate = None
        for _ in range(1000):
            bench.backend.streams[0]._gate.release()
        assert (await running).status_code == 200
        assert (await complete(client, n=4)).status_code == 200


async def test_a_request_of_many_sequences_is_one_request_of_its_minute(services):
    async with http_client(keyed(services, "a", requests_per_minute=2), "a") as client:
        for expected in (200, 200, 429):
            answer = await complete(client, prompt=["hi"] * 4, n=3, max_tokens=1)
            assert answer.status_code == expected


async def cached_tokens(services, bench, keys):
    """What each key is told of a prompt that all of them send, of an engine that keeps prefixes."""
    known = set()

    def answer(request):
        hit = request.cache_salt in known
        known.add(request.cache_salt)
        return make_outputs(request, [1], num_cached_tokens=len(request.prompt_token_ids) * hit)

    bench.backend.script = answer
    told = []
    for key in keys:
        async with http_client(services, key) as client:
            usage = (await complete(client)).json()["usage"]
            told.append(usage["prompt_tokens_details"]["cached_tokens"] > 0)
    return told


async def test_by_default_no_key_is_told_of_what_another_has_sent(services, bench):
    auth = parse_config({"auth": {"api_keys": "a,b"}}).auth
    assert await cached_tokens(configured(services, auth), bench, "aba") == [False, False, True]


async def test_keys_that_share_a_cache_do_so_by_choice(services, bench):
    auth = parse_config({"auth": {"api_keys": "a,b", "salt_prefix_cache_by_key": False}}).auth
    assert await cached_tokens(configured(services, auth), bench, "ab") == [False, True]


async def test_without_keys_everybody_is_one_tenant(services, bench):
    auth = parse_config({}).auth
    assert await cached_tokens(configured(services, auth), bench, "ab") == [False, True]


def configured(services, auth):
    callers = make_callers(
        auth.load_keys(), time.monotonic, salt_prefix_cache=auth.salt_prefix_cache_by_key
    )
    return dataclasses.replace(services, authenticator=make_authenticator(callers))
