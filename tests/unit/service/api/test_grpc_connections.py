"""What a gRPC connection may hold: health watches, reflection, streams, and its own age."""

import asyncio
import socket
import time

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.http2 import INITIAL_WINDOW_SIZE, PREFACE, settings
from workers.engine.protocol import StepOutput

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(240)]

# For what comes at once unless the machine is busy with others.
PATIENCE_S = 30.0


def watch(channel):
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())


def reflect(channel):
    asked = reflection_pb2.ServerReflectionRequest(list_services="")

    async def requests():
        yield asked
        await asyncio.Event().wait()

    return reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(requests())


async def status_of(stream):
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        async for _ in stream:
            pass
    return failure.value.code()


def request(max_tokens):
    sampling = pb.SamplingParams(max_tokens=max_tokens)
    return pb.GenerateRequest(model="tiny", text=pb.Text(text="hi"), sampling=sampling)


def generate(channel):
    """Also on a connection that has to be tried again."""
    stub = pb_grpc.InferenceStub(channel)
    return stub.Generate(request(5), timeout=PATIENCE_S, wait_for_ready=True)


async def read_when_there_is_a_place(open_stream, channel):
    """The first answer of a stream, asked for until one that ends has given its place back."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await open_stream(channel).read()
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("open_stream", [watch, reflect])
async def test_side_streams_lock_nobody_out(serve_grpc, open_stream):
    connect = await serve_grpc(max_concurrent_calls=4, max_side_streams=6)
    streams = []
    for _ in range(20):
        streams.append(open_stream(connect()))
        await streams[-1].read()
    answers = await asyncio.gather(*(generate(connect()) for _ in range(4)))
    assert all(answer.choices for answer in answers)
    # The oldest made room for the youngest.
    assert await asyncio.wait_for(streams[0].code(), PATIENCE_S) is grpc.StatusCode.UNAVAILABLE
    newest = open_stream(connect())
    await asyncio.wait_for(newest.read(), PATIENCE_S)
    assert not newest.done()


async def test_a_connection_has_so_many_side_streams_and_no_more(serve_grpc):
    connect = await serve_grpc(max_side_streams_per_connection=3)
    channel = connect()
    streams = [watch(channel) for _ in range(3)]
    for stream in streams:
        await stream.read()
    assert await status_of(watch(channel)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    await watch(connect()).read()
    streams[0].cancel()
    await read_when_there_is_a_place(watch, channel)
    assert not streams[1].done()


async def test_a_side_stream_ends_at_its_age_and_can_be_asked_for_again(serve_grpc):
    connect = await serve_grpc(max_side_stream_age_s=0.5)
    channel = connect()
    started_s = time.monotonic()
    stream = watch(channel)
    assert await status_of(stream) is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - started_s > 0.4
    await watch(channel).read()


async def test_a_watch_of_an_unknown_service_still_ends_by_itself(serve_grpc):
    connect = await serve_grpc()
    request = health_pb2.HealthCheckRequest(service="nobody")
    answers = [one async for one in health_pb2_grpc.HealthStub(connect()).Watch(request)]
    assert [one.status for one in answers] == [health_pb2.HealthCheckResponse.SERVICE_UNKNOWN]


async def test_a_stream_outlives_the_age_and_the_idleness_of_its_connection(serve_grpc, bench):
    bench.backend.gate = asyncio.Semaphore(0)
    connect = await serve_grpc(max_age_s=0.5, max_idle_s=0.5)
    stream = pb_grpc.InferenceStub(connect()).GenerateStream(request(8))
    chunks = []

    async def read():
        async for chunk in stream:
            chunks.append(chunk)

    reading = asyncio.create_task(read())
    for _ in range(8):
        await asyncio.sleep(0.4)
        bench.backend.gate.release()
    await asyncio.wait_for(reading, PATIENCE_S)
    assert len(chunks) > 5
    assert await stream.code() is grpc.StatusCode.OK


async def is_closed(port, sent=b"", within_s=PATIENCE_S):
    """Whether the server closes a connection that sends only that."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        async with asyncio.timeout(within_s):
            while await reader.read(4096):
                pass
        return True
    except ConnectionResetError:
        return True
    except TimeoutError:
        return False
    finally:
        writer.close()


async def test_connections_that_say_nothing_are_closed(serve_grpc):
    connect = await serve_grpc(handshake_timeout_s=0.5)
    # Less than by default.
    assert await is_closed(connect.port, within_s=9.0)
    assert await is_closed(connect.port, PREFACE[:10], within_s=9.0)


async def test_idle_connections_and_those_that_answer_no_ping_are_closed(serve_grpc):
    connect = await serve_grpc(max_idle_s=0.5)
    assert await is_closed(connect.port, PREFACE + settings())
    connect = await serve_grpc(keepalive_interval_s=1.0, keepalive_timeout_s=0.5)
    assert await is_closed(connect.port, PREFACE + settings())


async def test_connections_beyond_the_ceiling_are_closed(serve_grpc):
    connect = await serve_grpc(max_connections=3)
    # Accepted in their order, so that those that are held are there when the next one comes.
    held = [socket.create_connection(("127.0.0.1", connect.port)) for _ in range(3)]
    assert await is_closed(connect.port, PREFACE + settings())
    for one in held:
        one.close()
    assert (await generate(connect())).choices


async def test_a_connection_says_how_many_streams_it_takes(serve_grpc):
    connect = await serve_grpc(max_streams_per_connection=7)
    reader, writer = await asyncio.open_connection("127.0.0.1", connect.port)
    writer.write(PREFACE + settings())
    head = await asyncio.wait_for(reader.readexactly(9), PATIENCE_S)
    values = await reader.readexactly(int.from_bytes(head[:3]))
    writer.close()
    pairs = [values[start : start + 6] for start in range(0, len(values), 6)]
    said = {int.from_bytes(p[:2]): int.from_bytes(p[2:]) for p in pairs}
    assert said[3] == 7
    # What nobody reads yet: a message that is being read has room for all of it.
    assert said[INITIAL_WINDOW_SIZE] <= 16 << 10


async def test_a_call_whose_message_does_not_come_ends_with_a_typed_error(serve_grpc):
    connect = await serve_grpc(receive_timeout_s=0.3)
    for method in ("Generate", "GenerateStream"):
        call = connect().stream_stream(f"/tessera.v1.Inference/{method}")()
        async with asyncio.timeout(PATIENCE_S):
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            trailing = dict(await call.trailing_metadata())
        assert trailing["tessera-error-code"] == "request_timeout"


class EndlessStream:
    """Long outputs, so that what lies between server and client is full soon."""

    def __init__(self, request_id):
        self.request_id = request_id
        self.is_aborted = asyncio.Event()

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        return StepOutput(self.request_id, [5] * 2000)

    async def aclose(self):
        self.is_aborted.set()


async def test_answers_that_nobody_reads_are_given_up_and_whoever_reads_on_learns_it(
    serve_grpc, bench
):
    streams = []

    async def submit(request, context):
        streams.append(EndlessStream(request.request_id))
        return streams[-1]

    bench.backend.submit = submit
    connect = await serve_grpc(write_timeout_s=0.3)
    # Else the client's window grows with what it takes for the bandwidth, to megabytes, and is not
    # full for as long.
    channel = connect(("grpc.http2.bdp_probe", 0))
    unread = pb_grpc.InferenceStub(channel).GenerateStream(request(500))
    async with asyncio.timeout(PATIENCE_S):
        while not streams:
            await asyncio.sleep(0.01)
        await streams[0].is_aborted.wait()
        assert await status_of(unread) is grpc.StatusCode.DEADLINE_EXCEEDED
