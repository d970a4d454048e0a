"""The HTTP server of the ingress bounds the heads of requests."""

import asyncio

import pytest

from service.deployments.framing import MAX_HEADER_BYTES
from service.deployments.listeners import HttpServer, bind_shared

BEGIN = b"POST / HTTP/1.1\r\nHost: a\r\n"


async def app(scope, receive, send):
    await receive()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


async def status_of(*parts: bytes) -> bytes:
    """The first line of the answer to parts that are sent one by one; b"" if it was cut off."""
    listener = bind_shared("127.0.0.1", 0)
    server = HttpServer(app, 5, 1)
    await server.start(listener)
    reader, writer = await asyncio.open_connection(*listener.getsockname())
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(0.002)
        return await asyncio.wait_for(reader.readline(), 5)
    except ConnectionError:
        return b""
    finally:
        writer.close()
        await server.stop()


@pytest.mark.asyncio
async def test_headers_over_the_ceiling_are_refused():
    good = b"X-Long: " + b"x" * (MAX_HEADER_BYTES - 100) + b"\r\n\r\n"
    assert b" 200 " in await status_of(BEGIN + good)
    long = b"X-Long: " + b"x" * MAX_HEADER_BYTES + b"\r\n\r\n"
    assert b" 200 " not in await status_of(BEGIN + long)
    many = b"".join(b"X-%d: y\r\n" % number for number in range(4000))
    assert b" 200 " not in await status_of(BEGIN + many + b"\r\n")
    path = b"POST /" + b"x" * MAX_HEADER_BYTES + b" HTTP/1.1\r\n\r\n"
    assert b" 200 " not in await status_of(path)


@pytest.mark.asyncio
async def test_a_head_that_never_ends_is_cut_off():
    endless = [b"x" * 4096] * (MAX_HEADER_BYTES // 4096)
    assert b" 400 " in await status_of(BEGIN + b"X-Long: ", *endless)


@pytest.mark.asyncio
async def test_a_large_body_in_the_same_read_is_no_large_head():
    size = MAX_HEADER_BYTES * 3
    head = BEGIN + b"Content-Length: %d\r\n\r\n" % size
    assert b" 200 " in await status_of(head + b"x" * size)
