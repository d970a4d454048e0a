"""The session of a request as clients name it, over HTTP and gRPC, down to the backend."""

import dataclasses

import grpc
import httpx
import pytest
import pytest_asyncio

from service.api.auth import make_authenticator
from service.api.grpc import build_grpc_server
from service.api.http import build_http_app
from service.limits import Limits
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from service.routing.routed_stream import RoutedStream
from service.routing.session import NO_SESSION
from tests.fakes.backend import make_outputs
from tests.fakes.callers import callers_of

pytestmark = pytest.mark.asyncio
HEADER = "x-session-id"
MAX_BYTES = Limits().max_session_id_bytes


class Sessions:
    """What the router would make of the session of each request so far."""

    def __init__(self, backend):
        self._backend = backend

    def __len__(self):
        return len(self._backend.requests)

    def __getitem__(self, index):
        return [
            RoutedStream(request, context, None, 1).session_key
            for request, context in zip(self._backend.requests, self._backend.contexts, strict=True)
        ][index]


@pytest.fixture
def keys(bench):
    bench.backend.script = lambda request: make_outputs(request, [1])
    return Sessions(bench.backend)


async def complete(client, name="", path="completions", header=HEADER, **fields):
    prompt = (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    )
    return await client.post(
        f"/v1/{path}",
        json={"model": "tiny", "max_tokens": 1, **prompt, **fields},
        headers={header: name} if name else {},
    )


@pytest_asyncio.fixture
async def stub(services):
    server, port = build_grpc_server(services, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.InferenceStub(channel)
    await server.stop(None)


def grpc_request(**fields):
    return pb.GenerateRequest(text=pb.Text(text="hi"), **fields)


async def test_equal_names_are_one_session_and_different_ones_are_not(client, keys):
    for name in ("one", "two", "one", ""):
        assert (await complete(client, name)).status_code == 200
    one, two, again, none = keys
    assert one == again != two
    assert none == NO_SESSION != one


async def test_a_session_is_the_same_over_http_and_grpc_and_on_every_route(client, stub, keys):
    await complete(client, "one")
    await complete(client, "one", "chat/completions")
    await stub.Generate(grpc_request(), metadata=((HEADER, "one"),))
    async for _ in stub.GenerateStream(grpc_request(), metadata=((HEADER, "one"),)):
        pass
    await stub.Generate(grpc_request())
    assert len(set(keys[:4])) == 1
    assert keys[4] == NO_SESSION


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_the_body_names_a_session_where_no_header_does(client, keys, path):
    await complete(client, "one", path)
    await complete(client, "", path, session_id="one")
    await complete(client, "", path, prompt_cache_key="one")
    await complete(client, "", path, session_id="one", prompt_cache_key="two")
    await complete(client, "one", path, session_id="two")
    assert NO_SESSION not in keys
    assert len(set(keys)) == 1


async def test_every_choice_of_a_request_belongs_to_its_session(client, keys):
    await complete(client, "one", n=3)
    assert len(keys) == 3
    assert len(set(keys)) == 1


async def test_sessions_of_different_callers_or_salts_are_different(services, keys):
    keyed = dataclasses.replace(services, authenticator=make_authenticator(callers_of("a", "b")))
    transport = httpx.ASGITransport(app=build_http_app(keyed))
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        for key in "ab":
            client.headers["authorization"] = f"Bearer {key}"
            await complete(client, "one")
            await complete(client, "one", cache_salt="tenant")
    assert len(set(keys)) == 4


@pytest.mark.parametrize("name", ["a" * (MAX_BYTES + 1), "ä" * (MAX_BYTES // 2 + 1)])
async def test_a_name_that_is_too_long_is_a_typed_error_over_both_protocols(
    client, stub, keys, name
):
    for answer in (
        await complete(client, session_id=name),
        await complete(client, name.replace("ä", "aa")),
    ):
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["code"], error["param"]) == ("limit_exceeded", "session_id")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(grpc_request(), metadata=((HEADER, name.replace("ä", "aa")),))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert len(keys) == 0


async def test_a_name_of_the_greatest_length_is_taken(client, keys):
    answer = await complete(client, "a" * MAX_BYTES)
    assert answer.status_code == 200
    assert len(keys) == 1


async def test_the_header_is_the_one_of_the_settings(services, keys):
    other = dataclasses.replace(services, session_header="x-conversation")
    transport = httpx.ASGITransport(app=build_http_app(other))
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        await complete(client, "one")
        await complete(client, "one", header="X-Conversation")
    assert keys[0] == NO_SESSION != keys[1]
