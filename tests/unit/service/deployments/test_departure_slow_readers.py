"""A gRPC stream that its client reads slowly outlives the engine's last token, and so does the
ingress: until the answer is out, or the drain's time is up."""

import asyncio
import time

import grpc
import pytest
import pytest_asyncio

from service.api.auth import OpenAuthenticator
from service.api.grpc import build_grpc_server
from service.api.grpc_calls_under_way import CallsUnderWay
from service.api.services import ApiServices
from service.deployments.departure import LAST_BYTES_S, Departure
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.backend import make_failure, make_outputs
from tests.fakes.text import make_bench
from workers.errors import ErrorCode

pytestmark = pytest.mark.asyncio
NUM_TOKENS = 400
SLOW_S = LAST_BYTES_S + 1.5


class Requests:
    """Of the fake backend, whose requests end with their last token, read or not."""

    is_draining = False
    num_live_requests = 0

    def begin_drain(self):
        self.is_draining = True

    def end_requests(self):
        return 0


class Ingress:
    """A gRPC server that answers every request with NUM_TOKENS tokens at once; if it says so,
    with an error after them."""

    has_errors = False

    async def start(self, folder):
        bench = make_bench(folder, self.answer)
        services = ApiServices(bench.models, OpenAuthenticator(), lambda: True, "0", 0)
        self.calls = CallsUnderWay()
        self.server, port = build_grpc_server(services, "127.0.0.1:0", calls=self.calls)
        await self.server.start()
        # A client's connection takes few bytes before somebody asks for the next message.
        small = (("grpc.http2.lookahead_bytes", 1 << 10), ("grpc.http2.bdp_probe", 0))
        self.channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=small)
        return self

    def answer(self, request):
        outputs = make_outputs(request, [10] * (NUM_TOKENS + 1))
        if self.has_errors:
            outputs[-1].finish_reason = None
            outputs.append(make_failure(request, ErrorCode.ENGINE_FAILED, "gone"))
        return outputs

    def ask(self):
        prompt = pb.TokenIds(ids=[5])
        options = pb.SamplingParams(max_tokens=NUM_TOKENS, logprobs=20)
        message = pb.GenerateRequest(token_ids=prompt, sampling=options)
        return pb_grpc.InferenceStub(self.channel).GenerateStream(message)

    async def leave(self, drain_timeout_s):
        requests = Requests()
        departure = Departure(
            None, self.server, self.calls, requests, requests.end_requests, drain_timeout_s
        )
        started_s = time.monotonic()
        await departure.run()
        return time.monotonic() - started_s

    async def close(self):
        await self.channel.close()
        await self.server.stop(None)


@pytest_asyncio.fixture
async def ingress(tmp_path):
    ingress = await Ingress().start(tmp_path)
    yield ingress
    await ingress.close()


async def begin(call):
    """The tokens of the first message."""
    return list((await call.read()).choice.token_ids)


async def read_on(call, token_ids):
    while (message := await call.read()) is not grpc.aio.EOF:
        token_ids += message.choice.token_ids
    return token_ids


async def test_a_departure_waits_for_whoever_reads_slowly(ingress):
    call = ingress.ask()
    token_ids = await begin(call)
    leaving = asyncio.create_task(ingress.leave(200.0))
    await asyncio.sleep(SLOW_S)
    assert not leaving.done()
    assert await read_on(call, token_ids) == [10] * NUM_TOKENS
    assert await call.code() is grpc.StatusCode.OK
    read_s = time.monotonic()
    await leaving
    assert time.monotonic() - read_s < 60, "not until the drain ends"


@pytest.mark.nightly
async def test_an_error_comes_after_all_that_was_there_before_it(ingress):
    ingress.has_errors = True
    call = ingress.ask()
    token_ids = await begin(call)
    leaving = asyncio.create_task(ingress.leave(30.0))
    await asyncio.sleep(SLOW_S)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await read_on(call, token_ids)
    assert token_ids == [10] * NUM_TOKENS
    assert dict(ended.value.trailing_metadata())["tessera-error-code"]
    await leaving


async def test_who_does_not_read_at_all_is_waited_for_until_the_drain_ends(ingress, caplog):
    call = ingress.ask()
    token_ids = await begin(call)
    assert await ingress.leave(2.0) < 2.0 + LAST_BYTES_S + 60
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await read_on(call, token_ids)
    assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "1 gRPC calls had not been read" in caplog.text


class Rpc:
    """As much of gRPC's as is asked of it here."""

    def add_done_callback(self, callback):
        self.end = lambda: callback(self)


async def test_calls_that_come_during_the_wait_do_not_prolong_it():
    calls, first, second = CallsUnderWay(), Rpc(), Rpc()
    calls.enter(first)
    waiting = asyncio.create_task(calls.wait(120.0))
    await asyncio.sleep(0)
    calls.enter(second)
    first.end()
    assert await asyncio.wait_for(waiting, 60.0) == 0
    assert len(calls) == 1
    assert await calls.wait(0.01) == 1
    second.end()
    await asyncio.sleep(0)
    assert len(calls) == 0
    assert await calls.wait(0.01) == 0
