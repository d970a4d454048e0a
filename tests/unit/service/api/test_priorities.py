"""Priorities as clients ask for them: within their caller's range, over HTTP and gRPC."""

import dataclasses
import time

import grpc
import httpx
import pytest
import pytest_asyncio

from service.api.auth import OpenAuthenticator, make_authenticator
from service.api.grpc import build_grpc_server
from service.api.http import build_http_app
from service.config import parse_config
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from service.security.api_keys import parse_key_file
from service.security.callers import make_anonymous, make_callers
from service.security.priorities import PriorityRange
from service.security.quota import KeyLimits

pytestmark = pytest.mark.asyncio
LEAST, GREATEST = 1 - 2**31, 2**31 - 1
FILE = f"""
plain name=plain
urgent name=urgent min_priority=-10
late name=late max_priority=7
whole name=whole min_priority={LEAST} max_priority={GREATEST}
"""
ALLOWED = [
    ("plain", 0), ("urgent", -10), ("urgent", 0), ("late", 7), ("whole", LEAST), ("whole", GREATEST)
]  # fmt: skip
REFUSED = [
    ("plain", -1), ("plain", 1), ("plain", LEAST), ("urgent", -11), ("urgent", 1), ("late", 8),
    ("late", -1), ("plain", GREATEST),
]  # fmt: skip


@pytest.fixture
def keyed(services):
    keys = parse_key_file(FILE, KeyLimits(), PriorityRange())
    callers = make_callers(keys, time.monotonic, salt_prefix_cache=True)
    return dataclasses.replace(services, authenticator=make_authenticator(callers))


@pytest_asyncio.fixture
async def stub(keyed):
    server, port = build_grpc_server(keyed, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.InferenceStub(channel)
    await server.stop(None)


async def post(services, priority, key="", path="completions"):
    transport = httpx.ASGITransport(app=build_http_app(services))
    prompt = (
        {"messages": [{"role": "user", "content": "hi"}]} if "chat" in path else {"prompt": "hi"}
    )
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        return await client.post(
            f"/v1/{path}",
            json={"model": "tiny", "max_tokens": 1, "priority": priority, **prompt},
            headers={"authorization": f"Bearer {key}"},
        )


def call(stub, priority, key):
    request = pb.GenerateRequest(text=pb.Text(text="hi"), priority=priority)
    return stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),))


@pytest.mark.parametrize(("key", "priority"), ALLOWED)
async def test_a_key_uses_its_range(keyed, bench, stub, key, priority):
    for path in ("completions", "chat/completions"):
        assert (await post(keyed, priority, key, path)).status_code == 200
    await call(stub, priority, key)
    assert [request.priority for request in bench.backend.requests] == [priority] * 3


@pytest.mark.parametrize(("key", "priority"), REFUSED)
async def test_beyond_its_range_a_key_gets_a_typed_error(keyed, bench, stub, key, priority):
    for path in ("completions", "chat/completions"):
        answer = await post(keyed, priority, key, path)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "limit_exceeded")
        assert error["param"] == "priority"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(stub, priority, key)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["tessera-error-param"] == "priority"
    assert bench.backend.requests == []


async def test_no_range_has_the_least_number_of_all(keyed, bench, stub):
    """What would preempt everybody: its negation is no 32-bit number."""
    assert (await post(keyed, LEAST - 1, "whole")).status_code == 400
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(stub, LEAST - 1, "whole")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert bench.backend.requests == []


async def test_without_keys_everybody_has_the_range_of_the_settings_and_0_by_default(services):
    assert (await post(services, 0)).status_code == 200
    assert (await post(services, -1)).status_code == 400
    config = parse_config({"auth": {"priorities": {"min_priority": -3, "max_priority": 3}}})
    anonymous = make_anonymous(config.auth.priorities)
    opened = dataclasses.replace(services, authenticator=OpenAuthenticator(anonymous))
    assert [(await post(opened, p)).status_code for p in (-4, -3, 3, 4)] == [400, 200, 200, 400]
