"""Shared sockets and the HTTP server on them."""

import asyncio
import socket

import httpx
import pytest

from service.listeners import HttpServer, bind_shared


async def slow_app(scope, receive, send):
    await asyncio.sleep(0.3)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


def test_two_listeners_share_a_port():
    with bind_shared("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bind_shared("127.0.0.1", port) as second:
            assert second.getsockname() == first.getsockname()


def test_a_port_of_somebody_else_is_refused():
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(OSError, match="in use"):
        bind_shared("127.0.0.1", taken.getsockname()[1])


@pytest.mark.asyncio
async def test_stopping_lets_a_response_finish_and_accepts_no_more():
    listener = bind_shared("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server = HttpServer(slow_app, keep_alive_timeout_s=5, drain_timeout_s=5)
    await server.start(listener)
    server.check_health()
    async with httpx.AsyncClient() as client:
        running = asyncio.create_task(client.get(url))
        await asyncio.sleep(0.1)
        await server.stop()
        assert (await running).text == "done"
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
    with pytest.raises(RuntimeError, match="ended"):
        server.check_health()
