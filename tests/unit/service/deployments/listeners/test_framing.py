"""What a request may send around its body, and how many of them at once."""

import asyncio
import contextlib
import resource

import pytest

from service.deployments.bounded_http import MAX_PIPELINED_REQUESTS
from service.deployments.framing import MAX_FRAMING_BYTES, MAX_HEADERS
from tests.fakes.wire_server import CHUNKED, CLOSE, FAST, GET, POST, App, Server


async def send_until_closed(writer, part, max_bytes):
    """How many bytes went before the other end closed."""
    num_bytes = 0
    try:
        while num_bytes < max_bytes:
            writer.write(part)
            await writer.drain()
            num_bytes += len(part)
            await asyncio.sleep(0)
    except ConnectionError:
        pass
    return num_bytes


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        (CHUNKED + b"0\r\nX-Late: ", b"x" * 65536),
        (CHUNKED + b"0\r\n", b"X-Late: y\r\n" * 6000),
        (CHUNKED + b"1;", b"e" * 65536),
        (CHUNKED, b"1;e=e\r\nx\r\n" * 6000),
        (CHUNKED, b"1\r\nx\r\n" * 10000),
    ],
    ids=["one trailer", "many trailers", "one extension", "many extensions", "tiny chunks"],
)
def test_what_surrounds_a_body_is_bounded(run, begin, part):
    async def attack():
        async with Server(App()) as server:
            reader, writer = await server.connect(begin)
            before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            num_bytes = await send_until_closed(writer, part, 64 << 20)
            grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib
            writer.close()
            await server.until_empty()
            return num_bytes, grown_kib

    num_bytes, grown_kib = run(attack())
    # What the sockets of both ends hold, and not the 64 MiB.
    assert num_bytes < 16 << 20
    assert grown_kib < 24 << 10


def test_a_trailer_never_becomes_a_header(run_once):
    async def ask(app):
        async with Server(app) as server:
            reader, _ = await server.connect(CHUNKED + b"1\r\nx\r\n0\r\nX-Late: y\r\n\r\n")
            return await reader.readline()

    app = App()
    assert b" 200 " in run_once(ask(app))
    assert app.trailing == []


def test_many_small_headers_are_refused(run_once):
    async def ask(count):
        async with Server(App()) as server:
            headers = b"a:b\r\n" * count
            reader, _ = await server.connect(POST + headers + b"Content-Length: 0\r\n\r\n")
            return await reader.readline()

    assert b" 200 " in run_once(ask(MAX_HEADERS - 10))
    assert b" 400 " in run_once(ask(MAX_HEADERS + 10))


def test_honest_chunks_are_no_attack(run_once):
    async def ask(app):
        async with Server(app) as server:
            small = b"20\r\n" + b"x" * 32 + b"\r\n"
            reader, _ = await server.connect(CHUNKED, small * 40_000, b"0\r\n\r\n")
            return await reader.readuntil(b"bytes")

    assert b"1280000 bytes" in run_once(ask(App()))
    assert MAX_FRAMING_BYTES < 6 * 40_000


def test_pipelined_requests_are_answered_in_order_up_to_a_ceiling(run_once):
    async def ask(app, count):
        async with Server(app) as server:
            reader, _ = await server.connect(GET * (count - 1), GET[:-4] + CLOSE)
            answers = b""
            with contextlib.suppress(ConnectionResetError):
                while part := await reader.read(1 << 16):
                    answers += part
            return answers.count(b"200 OK"), answers.count(b" 400 ")

    assert run_once(ask(App(), MAX_PIPELINED_REQUESTS)) == (MAX_PIPELINED_REQUESTS, 0)
    app = App()
    _, num_refusals = run_once(ask(app, 10_000))
    # An answer of its own would be taken for the answer to the first.
    assert num_refusals == 0
    assert app.num_requests <= 1


UPGRADE = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"


@pytest.mark.parametrize(
    "body", [b"Content-Length: 27\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n1b\r\n"]
)
def test_the_body_of_a_request_for_another_protocol_is_no_request(run, body):
    """The parser ends such a request with its head; what follows was served as one of its own."""

    async def attack(app):
        async with Server(app, FAST) as server:
            reader, writer = await server.connect(POST + UPGRADE + body)
            await asyncio.sleep(0.1)
            with contextlib.suppress(ConnectionError):
                writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            return await reader.read()

    app = App()
    answer = run(attack(app))
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert answer.count(b"HTTP/1.1 ") == 1
    assert app.ends == []


@pytest.mark.parametrize("length", [b"", b"Content-Length: 0\r\n"])
def test_a_request_for_another_protocol_without_a_body_is_answered_in_this_one(run_once, length):
    async def ask():
        async with Server(App(), FAST) as server:
            reader, _ = await server.connect(POST + UPGRADE + length + b"\r\n")
            return await reader.readline()

    assert b" 200 " in run_once(ask())
