"""Shared sockets and the HTTP server on them."""

import asyncio
import socket
import threading
import time

import httpx
import pytest

from service.deployments import bounded_http
from service.deployments.bounded_http import LINGER_S
from service.deployments.listeners import HttpServer, bind_shared


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
    is_asked, is_released = asyncio.Event(), asyncio.Event()

    async def slow_app(scope, receive, send):
        is_asked.set()
        await is_released.wait()
        await quick_app(scope, receive, send)

    server = HttpServer(slow_app, keep_alive_timeout_s=5, drain_timeout_s=60)
    await server.start(listener)
    server.check_health()
    async with httpx.AsyncClient(timeout=60) as client:
        running = asyncio.create_task(client.get(url))
        await is_asked.wait()
        stopping = asyncio.create_task(server.stop())
        await asyncio.sleep(0.1)
        assert not stopping.done()
        is_released.set()
        await stopping
        assert (await running).text == "done"
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
    with pytest.raises(RuntimeError, match="ended"):
        server.check_health()


async def quick_app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"done"})


GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"


def read_answer(connection):
    connection.settimeout(60)
    answer = b""
    while not answer.endswith(b"0\r\n\r\n"):
        part = connection.recv(4096)
        assert part, f"closed after {answer!r}"
        answer += part
    return answer


@pytest.mark.asyncio
async def test_connections_that_wait_to_be_accepted_are_served_when_listening_ends():
    listener = bind_shared("127.0.0.1", 0)
    address = listener.getsockname()
    server = HttpServer(quick_app, keep_alive_timeout_s=5, drain_timeout_s=60)
    await server.start(listener)
    # The event loop does not get to run meanwhile: the kernel's queue holds them.
    clients = [socket.create_connection(address) for _ in range(50)]
    for client in clients[::2]:
        client.sendall(GET)
    await server.stop_accepting()
    for client in clients[1::2]:
        client.sendall(GET)
    for client in clients:
        answer = await asyncio.to_thread(read_answer, client)
        assert b"connection: close" in answer
        client.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    await server.stop()


@pytest.mark.asyncio
async def test_no_client_sees_one_of_two_listeners_go(monkeypatch):
    # A client's thread may stand still between connecting and sending.
    monkeypatch.setattr(bounded_http, "LINGER_S", 60.0)
    first, second = (HttpServer(quick_app, 5, 5) for _ in range(2))
    listener = bind_shared("127.0.0.1", 0)
    address = listener.getsockname()
    await first.start(listener)
    await second.start(bind_shared(*address))
    is_over, answered = threading.Event(), []

    def ask_again_and_again():
        while not is_over.is_set():
            with socket.create_connection(address) as client:
                client.sendall(GET)
                answered.append(read_answer(client))

    async def more_answers(number):
        enough = len(answered) + number
        while len(answered) < enough:
            assert not any(client.done() for client in clients)
            await asyncio.sleep(0.001)

    clients = [asyncio.create_task(asyncio.to_thread(ask_again_and_again)) for _ in range(8)]
    async with asyncio.timeout(120):
        for _ in range(5):
            await more_answers(16)
            await first.stop_accepting()
            await more_answers(16)
            await first.stop()
            first = HttpServer(quick_app, 5, 5)
            await first.start(bind_shared(*address))
    is_over.set()
    await asyncio.gather(*clients)
    await first.stop()
    await second.stop()


@pytest.mark.asyncio
@pytest.mark.parametrize("wait_s", [0.0, 0.5])
async def test_an_open_connection_gets_one_more_answer_after_listening_ended(wait_s, monkeypatch):
    monkeypatch.setattr(bounded_http, "LINGER_S", 60.0)
    listener = bind_shared("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
    server = HttpServer(quick_app, keep_alive_timeout_s=5, drain_timeout_s=60)
    await server.start(listener)
    async with httpx.AsyncClient() as client:
        assert "connection" not in (await client.get(url)).headers
        await server.stop_accepting()
        await asyncio.sleep(wait_s)
        answer = await client.get(url)
        assert (answer.text, answer.headers["connection"]) == ("done", "close")
        with pytest.raises(httpx.ConnectError):
            await client.get(url)
    await server.stop_within(1.0)


@pytest.mark.asyncio
async def test_an_idle_connection_is_closed_soon_after_listening_ended_and_a_busy_one_is_not():
    listener = bind_shared("127.0.0.1", 0)
    address = listener.getsockname()
    is_released = asyncio.Event()

    async def app(scope, receive, send):
        await is_released.wait()
        await quick_app(scope, receive, send)

    server = HttpServer(app, keep_alive_timeout_s=200, drain_timeout_s=60)
    await server.start(listener)
    with socket.create_connection(address) as idle, socket.create_connection(address) as busy:
        busy.sendall(GET)
        await asyncio.sleep(0.1)
        idle.settimeout(60)
        started_s = time.monotonic()
        await server.stop_accepting()
        assert await asyncio.to_thread(idle.recv, 1) == b""
        assert LINGER_S - 0.2 < time.monotonic() - started_s < 60, "long before it is stale"
        is_released.set()
        assert b"200 OK" in await asyncio.to_thread(read_answer, busy)
    await server.stop()


@pytest.mark.asyncio
async def test_answers_say_close_however_long_ago_listening_ended():
    listener = bind_shared("127.0.0.1", 0)

    async def slower_app(scope, receive, send):
        await asyncio.sleep(2.2)  # uvicorn renews its headers once a second
        await quick_app(scope, receive, send)

    server = HttpServer(slower_app, keep_alive_timeout_s=60, drain_timeout_s=60)
    await server.start(listener)
    with socket.create_connection(listener.getsockname()) as client:
        client.sendall(GET)
        await server.stop_accepting()
        assert b"connection: close" in await asyncio.to_thread(read_answer, client)
    await server.stop()
