"""What a connection may hold and leave unread before anybody knows who is there."""

import asyncio
import json
import socket

import pytest

from service.deployments import bounded_http, listeners
from service.security.connections import HttpConnectionLimits
from tests.fakes.wire_server import CHUNKED, FAST, GET, POST, App, Server


def now():
    """By the clock that the server's deadlines go by."""
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("begin", [b"G", GET[:-4], b"\r\n" * 3 + b"GET / HT"])
def test_a_head_that_does_not_come_is_answered_408(run, begin):
    async def attack():
        async with Server(App(), FAST) as server:
            started_s = now()
            reader, _ = await server.connect(begin)
            answer = await reader.read()
            return answer, now() - started_s

    answer, passed_s = run(attack())
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    assert passed_s < 3


def test_a_trickled_head_is_no_younger_for_it(run_once):
    async def attack():
        async with Server(App(), FAST) as server:
            reader, writer = await server.connect(GET[:-4])
            answer = asyncio.create_task(reader.readline())
            for byte in b"\r\nX-Slow: " + b"x" * 100:
                if answer.done():
                    return answer.result()
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)
            return b"never"

    assert b" 408 " in run_once(attack())


@pytest.mark.parametrize("is_chunked", [True, False])
def test_a_body_that_does_not_come_ends_its_request(run, is_chunked):
    async def attack(app):
        async with Server(app, FAST) as server:
            head = CHUNKED + b"5\r\nab" if is_chunked else POST + b"Content-Length: 50\r\n\r\nab"
            reader, writer = await server.connect(head)
            answer = await reader.read()
            writer.close()
            await server.until_empty()
            return answer

    app = App()
    assert b" 408 " in run(attack(app))
    assert app.ends == ["left"]


def test_a_slow_body_that_keeps_the_least_rate_is_read_to_its_end(run_once):
    async def upload(app, bytes_per_s):
        async with Server(app, FAST) as server:
            reader, writer = await server.connect(POST + b"Content-Length: 300000\r\n\r\n")
            for _ in range(30):
                writer.write(b"x" * 10_000)
                await asyncio.sleep(10_000 / bytes_per_s)
            return await reader.readline()

    assert b" 200 " in run_once(upload(App(), 150_000))


def test_time_in_which_the_server_does_not_read_is_not_the_clients(run):
    async def upload():
        may_read = asyncio.Event()
        app = App()

        async def busy_app(scope, receive, send):
            await may_read.wait()
            await app(scope, receive, send)

        async with Server(busy_app, FAST) as server:
            head = POST + b"Content-Length: 300000\r\n\r\n"
            reader, writer = await server.connect(head, b"x" * 100_000)
            waited = await server.connect(
                POST + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n"
            )
            await asyncio.sleep(1.5)
            may_read.set()
            writer.write(b"x" * 200_000)
            assert b" 100 " in await waited[0].readline()
            waited[1].write(b"xx")
            await waited[0].readline()
            return await reader.readline(), await waited[0].readline()

    first, second = run(upload())
    assert b" 200 " in first
    assert b" 200 " in second


def test_an_answered_request_does_not_go_on_for_ever(run_once, monkeypatch):
    monkeypatch.setattr(bounded_http, "ANSWERED_BODY_TIMEOUT_S", 0.5)

    async def refuse(scope, receive, send):
        await send({"type": "http.response.start", "status": 401, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def attack():
        async with Server(refuse) as server:
            reader, writer = await server.connect(CHUNKED)
            assert b" 401 " in await reader.readline()
            started_s = now()
            while server.server.num_connections:
                writer.write(b"400\r\n" + b"x" * 1024 + b"\r\n")
                await asyncio.sleep(0.02)
            return now() - started_s

    assert run_once(attack()) < 3


def test_an_answer_that_nobody_reads_is_given_up(run):
    async def attack(app):
        async with Server(app, FAST) as server:
            unread = socket.create_connection(server.address)
            unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            unread.sendall(GET)
            started_s = now()
            await server.until(1)
            await server.until_empty()
            unread.close()
            return now() - started_s

    app = App(num_answer_bytes=64 << 20)
    assert 0.9 < run(attack(app)) < 4


def test_whoever_reads_slowly_but_fast_enough_gets_the_whole_answer(run):
    size = 3 << 20
    limits = FAST.model_copy(update={"write_timeout_s": 0.5})

    async def read_slowly():
        async with Server(App(num_answer_bytes=size), limits) as server:
            reader, _ = await server.connect(GET)
            num_bytes = 0
            while num_bytes < size:
                num_bytes += len(await reader.read(1 << 16))
                await asyncio.sleep(0.04)
            return num_bytes

    assert run(read_slowly()) >= size


def test_connections_without_a_request_give_way_to_new_ones(run):
    limits = HttpConnectionLimits(max_connections=20)

    async def attack():
        async with Server(App(), limits) as server:
            kept = await server.connect(GET)
            await kept[0].readuntil(b"bytes")
            half = (b"", b"GET / HT", POST + b"Content-Length: 9\r\n\r\nx")
            flood = [await server.connect(half[i % 3]) for i in range(100)]
            answers = []
            for _ in range(30):
                reader, _ = await server.connect(GET)
                answers.append(await reader.readline())
            kept[1].write(GET)
            answers.append(await kept[0].readuntil(b"bytes"))
            num_connections = server.server.num_connections
            for _, writer in flood:
                writer.close()
            return answers, num_connections

    answers, num_connections = run(attack())
    assert all(b" 200 " in answer for answer in answers)
    assert num_connections <= 20


def test_when_every_connection_has_a_request_a_new_one_is_answered_503(run):
    limits = HttpConnectionLimits(max_connections=5)

    async def attack():
        is_released = asyncio.Event()
        app = App()

        num_held = 0

        async def slow_app(scope, receive, send):
            nonlocal num_held
            num_held += 1
            await is_released.wait()
            await app(scope, receive, send)

        async with Server(slow_app, limits) as server:
            busy = [await server.connect(GET) for _ in range(5)]
            async with asyncio.timeout(60):
                while num_held < 5:
                    await asyncio.sleep(0.01)
            reader, _ = await server.connect(POST + b"Content-Length: 100000\r\n\r\n" + b"x" * 9999)
            refusal = await reader.read()
            is_released.set()
            served = [await reader.readline() for reader, _ in busy]
            return refusal, served

    refusal, served = run(attack())
    assert refusal.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
    assert b"retry-after: 2\r\n" in refusal
    assert json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["code"] == "unavailable"
    assert all(b" 200 " in line for line in served)


def test_half_bodies_and_unread_answers_do_not_hold_a_drain(run, monkeypatch):
    monkeypatch.setattr(bounded_http, "LEAVING_TIMEOUT_S", 0.5)

    async def drain():
        server = Server(App(num_answer_bytes=64 << 20))
        await server.__aenter__()
        held = [
            await server.connect(POST + b"Content-Length: 100\r\n\r\nx"),
            await server.connect(CHUNKED + b"5\r\nx"),
            await server.connect(GET[:9]),
        ]
        unread = socket.create_connection(server.address)
        unread.sendall(GET)
        await server.until(4)
        await server.server.stop_accepting()
        started_s = now()
        await server.until_empty()
        passed_s = now() - started_s
        await server.server.stop()
        unread.close()
        for _, writer in held:
            writer.close()
        return passed_s

    assert run(drain()) < 3


def test_the_log_has_one_line_however_many_connections_are_cut_off(run_once, monkeypatch, caplog):
    monkeypatch.setattr(listeners, "_LOG_INTERVAL_S", 3600.0)

    async def attack():
        async with Server(App()) as server:
            for _ in range(30):
                _, writer = await server.connect(b"no request\r\n\r\n")
                writer.close()
            async with asyncio.timeout(60):
                while server.server._table.cuts.total() < 30:
                    await asyncio.sleep(0.01)
            monkeypatch.setattr(listeners, "_LOG_INTERVAL_S", 0.0)
            await asyncio.sleep(2.5 * listeners._CHECK_S)

    run_once(attack())
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == ["HTTP connections that were cut off: 30 sent what is no request, or too large"]
