"""A client that leaves aborts its request, whenever it leaves: played on the bare ASGI side."""

import asyncio
import logging

import pytest

from service.api.http_replies import response_in_pieces, started
from service.deployments.listeners import HttpServer, bind_shared
from tests.fakes.asgi_client import AsgiClient

pytestmark = pytest.mark.asyncio

# For what comes at once unless the machine is busy with others.
PATIENCE_S = 60.0


async def _until(condition):
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


def _body(stream, n):
    return {"model": "tiny", "prompt": "hi", "stream": stream, "n": n, "max_tokens": 50}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("num_tokens", [0, 1, 4])
async def test_leaving_aborts_every_choice(app, bench, stream, n, num_tokens):
    bench.backend.gate = asyncio.Semaphore(num_tokens)
    client = AsgiClient(app, "/v1/completions", _body(stream, n))
    running = asyncio.create_task(client.run())
    await _until(lambda: len(bench.backend.streams) == n)
    await asyncio.sleep(0.02)
    client.left.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert all(s.is_aborted for s in bench.backend.streams)
    assert [reason for reason, _ in bench.metrics.named("finished")] == ["abort"] * n


async def test_a_client_that_stops_reading_still_aborts_when_it_leaves(app, bench):
    bench.backend.gate = asyncio.Semaphore(1000)
    bench.backend.script = _endless(bench.backend.script)
    client = AsgiClient(app, "/v1/completions", _body(True, 1))
    client.accepts.clear()
    running = asyncio.create_task(client.run())
    await _until(lambda: bench.backend.streams)
    await asyncio.sleep(0.02)
    client.left.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert bench.backend.num_live == 0


def _endless(script):
    def play(request):
        outputs = list(script(request))
        for output in outputs:
            output.finish_reason = None
            output.stop_token_id = None
        return outputs * 50

    return play


async def test_cancelling_the_server_task_aborts_the_request(app, bench):
    bench.backend.gate = asyncio.Semaphore(2)
    client = AsgiClient(app, "/v1/completions", _body(True, 2))
    running = asyncio.create_task(client.run())
    await _until(lambda: client.messages)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert bench.backend.num_live == 0


async def test_a_stream_starts_even_if_its_first_token_takes_long(app, bench):
    bench.backend.gate = asyncio.Semaphore(0)
    client = AsgiClient(app, "/v1/completions", _body(True, 1))
    running = asyncio.create_task(client.run())
    await _until(lambda: client.messages)
    assert client.messages[0]["status"] == 200
    for _ in range(100):
        bench.backend.gate.release()
    await asyncio.wait_for(running, PATIENCE_S)
    payload = b"".join(message.get("body", b"") for message in client.messages)
    assert payload.endswith(b"data: [DONE]\n\n")
    assert bench.metrics.named("finished")[0][0] == "stop"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [True, False])
async def test_leaving_while_no_replica_has_the_request_yet_takes_it_back(app, bench, stream, n):
    outcomes = []

    async def wait_for_ever(request, context):
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            outcomes.append("taken back")
            raise

    bench.backend.submit = wait_for_ever
    client = AsgiClient(app, "/v1/completions", _body(stream, n))
    running = asyncio.create_task(client.run())
    await asyncio.sleep(0.05)
    client.left.set()
    await asyncio.wait_for(running, PATIENCE_S)
    assert outcomes == ["taken back"] * n


async def test_leaving_during_the_upload_is_the_clients_end_and_no_bug(app, bench, caplog):
    listener = bind_shared("127.0.0.1", 0)
    server = HttpServer(app, 5, 1)
    await server.start(listener)
    _, writer = await asyncio.open_connection(*listener.getsockname())
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
        b'Content-Length: 1000\r\n\r\n{"model": '
    )
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await _until(lambda: bench.metrics.named("rejected"))
    await server.stop()
    assert bench.metrics.named("rejected") == ["client_closed_request"]
    assert not [line for line in caplog.records if line.levelno >= logging.ERROR]


class Taken:
    """A client of one response that takes messages while `accepts` is set."""

    def __init__(self):
        self.accepts, self.left, self.messages = asyncio.Event(), asyncio.Event(), []

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message):
        await self.accepts.wait()
        self.messages.append(message)


def _counted(num_pieces, made):
    for _ in range(num_pieces):
        made.append(None)
        yield b"x" * (256 << 10)


async def test_a_large_body_is_made_as_its_client_takes_it():
    made, client = [], Taken()
    response = await response_in_pieces(_counted(64, made))
    num_before = len(made)
    assert num_before < 8
    sending = asyncio.create_task(response({"type": "http"}, client.receive, client.send))
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(made) == num_before
    client.accepts.set()
    await sending
    assert len(made) == 64
    assert sum(len(m.get("body", b"")) for m in client.messages) == 64 * (256 << 10)
    assert client.messages[-1]["more_body"] is False


async def test_a_client_that_leaves_a_large_body_ends_it():
    made, client = [], Taken()
    response = await response_in_pieces(_counted(1 << 20, made))
    client.accepts.set()
    sending = asyncio.create_task(response({"type": "http"}, client.receive, client.send))
    await _until(lambda: len(made) > 16)
    client.left.set()
    await sending
    assert len(made) < 1 << 20


async def test_a_small_body_has_its_length():
    made = []
    response = await response_in_pieces(_counted(2, made))
    assert response.headers["content-length"] == str(512 << 10)


async def test_a_generation_that_nobody_can_take_any_more_is_ended():
    """What waited for it was cancelled in the tick in which it had started."""

    class Started:
        num_ended = 0

        async def aclose(self):
            self.num_ended += 1

    class Staying:
        async def receive(self):
            await asyncio.Event().wait()

    made, may_start = Started(), asyncio.Event()

    async def start():
        await may_start.wait()
        return made

    waiting = asyncio.create_task(started(Staying(), start()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    may_start.set()
    await asyncio.sleep(0)  # the generation is there, and its waiter has not been told
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert made.num_ended == 1
