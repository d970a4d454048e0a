"""What clients without a key, or with bad manners, do to the gRPC port. All frames are by hand."""

import asyncio
import dataclasses
import gzip
import struct

import grpc.aio
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from service.api.auth import make_authenticator
from service.api.grpc_side_streams import MAX_READING, READING_S
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from service.security.api_keys import ApiKey
from service.security.callers import make_callers
from tests.fakes.http2 import (
    CONTINUATION,
    DATA,
    END_STREAM,
    HEADERS,
    RST_STREAM,
    Http2,
    frame,
    headers,
    message,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(60)]
CHECK, WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
MODELS = "/tessera.v1.Inference/ListModels"
KEY = (("authorization", "Bearer the-key"),)


@pytest.fixture
def services(services):
    callers = make_callers([ApiKey("the-key", "a")], lambda: 0.0, salt_prefix_cache=False)
    return dataclasses.replace(services, authenticator=make_authenticator(callers))


@pytest_asyncio.fixture
async def http2():
    """Connects by hand. Connections end with the test."""
    opened = []

    async def connect(port, window=None):
        opened.append(await Http2.connect(port, window))
        return opened[-1]

    yield connect
    for one in opened:
        one.close()


async def check(channel, timeout_s=5):
    stub = health_pb2_grpc.HealthStub(channel)
    return await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)


async def list_models(channel, timeout_s=5):
    stub = pb_grpc.InferenceStub(channel)
    return await stub.ListModels(pb.ListModelsRequest(), metadata=KEY, timeout=timeout_s)


NOT_YET = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


async def eventually(ask, within_s=10):
    """Until the server takes the call: the doorkeeper may not have looked since places got free."""
    async with asyncio.timeout(within_s):
        while True:
            try:
                return await ask()
            except grpc.aio.AioRpcError as error:
                if error.code() not in NOT_YET:
                    raise
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("path", [CHECK, WATCH, MODELS])
async def test_calls_without_a_message_lock_nobody_out(serve_grpc, http2, path):
    connect = await serve_grpc(max_concurrent_calls=4, max_side_streams=6)
    for _ in range(3):
        one = await http2(connect.port)
        for stream in range(1, 41, 2):
            one.send(headers(stream, path))
    await asyncio.sleep(0.5)
    await eventually(lambda: check(connect()))
    assert (await list_models(connect())).models


@pytest.mark.parametrize("path", [CHECK, WATCH])
async def test_clients_that_take_nothing_lock_nobody_out(serve_grpc, http2, path):
    """With a window of nothing even the end of a call cannot be told."""
    connect = await serve_grpc(max_concurrent_calls=4, max_side_streams=6, write_timeout_s=0.5)
    honest = connect()
    for _ in range(8):
        one = await http2(connect.port, window=0)
        for stream in range(1, 41, 2):
            one.send(headers(stream, path) + frame(DATA, END_STREAM, stream, message(b"")))
    await eventually(lambda: check(connect()))
    assert (await eventually(lambda: list_models(honest))).models


@pytest.mark.nightly
async def test_connections_without_known_callers_give_way(serve_grpc, http2):
    connect = await serve_grpc(max_connections=40)
    honest = connect()
    assert (await list_models(honest)).models
    silent = [await http2(connect.port) for _ in range(30)]
    watching = silent[-1]
    watching.send(headers(1, WATCH) + frame(DATA, END_STREAM, 1, message(b"")))
    async with asyncio.timeout(10):
        await asyncio.wait([one.reading for one in silent], return_when=asyncio.FIRST_COMPLETED)
    for _ in range(60):
        await http2(connect.port)
        await asyncio.sleep(0.05)
    # New ones are let in after the next look, and whoever showed a key kept its connection.
    assert (await eventually(lambda: list_models(connect()))).models
    assert (await list_models(honest)).models
    assert honest.get_state() is grpc.ChannelConnectivity.READY


async def test_a_connection_with_a_call_under_way_never_gives_way(serve_grpc, http2, bench):
    bench.backend.gate = asyncio.Semaphore(0)
    connect = await serve_grpc(max_connections=20)
    sampling = pb.SamplingParams(max_tokens=3)
    request = pb.GenerateRequest(model="tiny", text=pb.Text(text="hi"), sampling=sampling)
    calls = [pb_grpc.InferenceStub(connect()).Generate(request, metadata=KEY) for _ in range(12)]
    async with asyncio.timeout(10):
        while len(bench.backend.requests) < len(calls):
            await asyncio.sleep(0.02)
    for _ in range(40):
        await http2(connect.port)
        await asyncio.sleep(0.05)
    for _ in range(3 * len(calls)):
        bench.backend.gate.release()
    assert all(answer.choices for answer in await asyncio.gather(*calls))


async def test_messages_that_come_slowly_give_way_to_others(serve_grpc, http2):
    connect = await serve_grpc()
    one = await http2(connect.port)
    half = struct.pack(">BI", 0, 4 << 20) + b"x" * 100
    for stream in range(1, 41, 2):
        one.send(headers(stream, CHECK) + frame(DATA, 0, stream, half))

    def num_ended():
        ends = (stream for kind, flags, stream, _ in one.frames if kind == HEADERS and flags & 1)
        return len(set(ends))

    async with asyncio.timeout(20):
        while num_ended() < 20 - MAX_READING:
            await asyncio.sleep(0.02)
    await asyncio.sleep(3 * READING_S)
    assert num_ended() == 20 - MAX_READING
    await check(connect())


async def status_of(one, stream):
    """The grpc-status of a stream, as its digits."""
    async with asyncio.timeout(10):
        while True:
            for kind, flags, its, block in one.frames:
                if kind == HEADERS and flags & END_STREAM and its == stream:
                    return block.partition(b"grpc-status")[2].lstrip(b"\x01\x02")[:2].strip(b"\x00")
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("path", [CHECK, "/tessera.v1.Inference/Generate"])
async def test_a_message_that_unpacks_to_more_than_the_ceiling_is_refused(serve_grpc, http2, path):
    connect = await serve_grpc()
    one = await http2(connect.port)
    bomb = message(gzip.compress(bytes(64 << 20)), 1)
    more = ((b"grpc-encoding", b"gzip"), (b"authorization", b"Bearer the-key"))
    one.send(headers(1, path, more=more))
    for start in range(0, len(bomb), 1 << 14):
        one.send(frame(DATA, 0, 1, bomb[start : start + (1 << 14)]))
    assert (await status_of(one, 1)).startswith(b"8")
    await check(connect())


@pytest.mark.parametrize("data", [b"\x0a" + b"x" * 8192, b"\x0a\x02\xff\xfe", b"\x0a\x7f", None])
async def test_health_messages_that_are_no_health_messages_are_refused(serve_grpc, http2, data):
    connect = await serve_grpc()
    one = await http2(connect.port)
    body = b"" if data is None else message(data)
    one.send(headers(1, CHECK) + frame(DATA, END_STREAM, 1, body))
    assert (await status_of(one, 1)).startswith(b"3")


async def test_heads_without_end_close_their_connection(serve_grpc, http2):
    connect = await serve_grpc()
    one = await http2(connect.port)
    one.send(headers(1, CHECK, flags=0))
    for _ in range(50):
        one.send(frame(CONTINUATION, 0, 1, b"\x00\x06x-long\x7f\xc1\x3e" + b"y" * 8128))
    async with asyncio.timeout(5):
        await one.closed()
    await check(connect())


async def test_streams_that_are_reset_at_once_leave_nothing(serve_grpc, http2):
    connect = await serve_grpc(max_concurrent_calls=4, max_side_streams=6)
    one = await http2(connect.port)
    reset = struct.pack(">I", 8)
    for stream in range(1, 10_001, 2):
        path = (WATCH, CHECK, MODELS)[stream % 3]
        one.send(headers(stream, path) + frame(RST_STREAM, 0, stream, reset))
    await eventually(lambda: check(connect()))
    assert (await list_models(connect())).models
