"""What gRPC itself does to a call that is on its way when a server tells its clients to go."""

import asyncio

import grpc
import pytest

from service.api.auth import OpenAuthenticator
from service.api.grpc import build_grpc_server
from service.api.services import ApiServices
from tests.fakes.http2 import DATA, END_STREAM, HEADERS, Http2, frame, headers, message
from tests.fakes.text import make_bench

GOAWAY = 7


def call(stream):
    end = frame(DATA, END_STREAM, stream, message(b""))
    return headers(stream, "/tessera.v1.Inference/ListModels") + end


def frames_of(connection, kind, stream):
    return [one for one in connection.frames if one[0] == kind and one[2] == stream]


async def until(condition):
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.mark.asyncio
@pytest.mark.xfail(
    reason="gRPC answers CANCELLED for calls that it takes while it shuts down",
    raises=AssertionError,
    strict=True,
)
async def test_a_call_that_crosses_the_goodbye_is_served(tmp_path):
    bench = make_bench(tmp_path)
    services = ApiServices(bench.models, OpenAuthenticator(), lambda: True, "0", 0)
    server, port = build_grpc_server(services, "127.0.0.1:0")
    await server.start()
    connection = await Http2.connect(port)
    connection.send(call(1))
    await until(lambda: len(frames_of(connection, HEADERS, 1)) == 2)
    stopping = asyncio.create_task(server.stop(20.0))
    await asyncio.sleep(0)
    connection.send(call(3))  # before any frame of the server's can have been read
    await until(lambda: frames_of(connection, GOAWAY, 0) and frames_of(connection, HEADERS, 3))
    connection.close()
    await stopping
    told = b"".join(payload for _, _, _, payload in frames_of(connection, HEADERS, 3))
    status = f"grpc-status\x01{grpc.StatusCode.CANCELLED.value[0]}".encode()
    assert status not in told
