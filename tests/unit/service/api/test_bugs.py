"""A bug of ours: what its client is told, and that it is counted, logged and named, once."""

import asyncio
import dataclasses
import logging

import grpc
import pytest
import pytest_asyncio

from service.api import model_routes
from service.api.grpc import build_grpc_server
from service.api.responses import keeping
from service.observability.request_log.observer import NoTracing, RequestObserver
from service.observability.request_log.record import NO_SPAN
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.backend import FakeStream, make_outputs

pytestmark = pytest.mark.asyncio
COMPLETION = {"model": "tiny", "prompt": "hi", "max_tokens": 4}
ID = {"x-request-id": "r-17"}
REQUEST = pb.GenerateRequest(text=pb.Text(text="hi"))


class KeepingTracer(NoTracing):
    def __init__(self):
        self.records = []

    def begin(self, record, traceparent, tracestate):
        self.records.append(record)
        return NO_SPAN


@pytest.fixture
def tracer():
    return KeepingTracer()


@pytest.fixture
def services(services, tracer):
    observer = RequestObserver(tracer, is_access_log_enabled=False)
    return dataclasses.replace(services, observer=observer)


@pytest.fixture
def broken_submit(bench):
    async def submit(request, context):
        raise RuntimeError("secret detail")

    bench.backend.submit = submit


@pytest.fixture
def broken_stream(bench):
    class Broken(FakeStream):
        async def __anext__(self):
            if not self._outputs:
                raise RuntimeError("secret detail")
            return self._outputs.pop(0)

    async def submit(request, context):
        return Broken(make_outputs(request, [4, 5, 6])[:2], None)

    bench.backend.submit = submit


@pytest_asyncio.fixture
async def stub(services):
    server, port = build_grpc_server(services, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.InferenceStub(channel)
    await server.stop(None)


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.usefixtures("broken_submit")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_500_has_its_requests_id_and_is_counted_and_logged(
    client, bench, tracer, caplog, stream
):
    with caplog.at_level(logging.ERROR):
        answer = await client.post(
            "/v1/completions", json=COMPLETION | {"stream": stream}, headers=ID
        )
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert answer.headers["x-request-id"] == "r-17"
    assert "secret" not in answer.text
    assert bench.metrics.calls == [("rejected", "internal")]
    (record,) = tracer.records
    assert (record.status, record.error_code, record.route) == (
        "500",
        "internal",
        "/v1/completions",
    )
    (line,) = [line for line in caplog.records if line.name.startswith("service")]
    assert "r-17" in line.getMessage()
    assert "secret detail" in str(line.exc_info[1])


async def test_a_bug_where_no_model_is_known_is_counted_too(client, bench, services, monkeypatch):
    def broken(*_):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(model_routes, "model_card", broken)
    answer = await client.get("/v1/models", headers=ID)
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "r-17")
    assert bench.metrics.calls == [("rejected", "internal")]


@pytest.mark.usefixtures("broken_stream")
@pytest.mark.parametrize("stream", [False, True])
async def test_a_bug_behind_an_accepted_request_is_the_reason_of_its_end(
    client, bench, tracer, stream
):
    await client.post("/v1/completions", json=COMPLETION | {"stream": stream})
    assert [reason for reason, _ in bench.metrics.named("finished")] == ["internal"]
    assert bench.metrics.named("rejected") == []
    assert tracer.records[0].error_code == "internal"


async def test_a_bug_in_an_answers_rendering_is_the_reason_of_its_end(client, bench, monkeypatch):
    def broken(*_):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(model_routes.CompletionRenderer, "chunk", broken)
    monkeypatch.setattr(model_routes.CompletionRenderer, "body", broken)
    bench.backend.gate = asyncio.Semaphore(1)  # so that the engine has not come to its end
    await client.post("/v1/completions", json=COMPLETION | {"stream": True})
    assert [reason for reason, _ in bench.metrics.named("finished")] == ["internal"]
    bench.backend.gate = None
    answer = await client.post("/v1/completions", json=COMPLETION)
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")


@pytest.mark.usefixtures("broken_submit")
@pytest.mark.parametrize("rpc", ["Generate", "GenerateStream"])
async def test_a_grpc_bug_has_its_calls_id_and_is_counted_and_logged(
    stub, bench, tracer, caplog, rpc
):
    call = getattr(stub, rpc)(REQUEST, metadata=tuple(ID.items()))
    with pytest.raises(grpc.aio.AioRpcError) as caught, caplog.at_level(logging.ERROR):
        await (call.read() if rpc == "GenerateStream" else call)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    assert dict(caught.value.initial_metadata())["x-request-id"] == "r-17"
    await until(lambda: bench.metrics.calls == [("rejected", "internal")])
    (record,) = tracer.records
    assert (record.status, record.error_code) == ("INTERNAL", "internal")
    assert any("secret detail" in str(line.exc_info) for line in caplog.records if line.exc_info)


@pytest.mark.usefixtures("broken_stream")
async def test_a_grpc_bug_within_a_stream_is_the_reason_of_its_end(stub, bench, tracer):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.GenerateStream(REQUEST):
            pass
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    await until(lambda: bench.metrics.named("finished"))
    assert [reason for reason, _ in bench.metrics.named("finished")] == ["internal"]
    assert bench.metrics.named("rejected") == []
    assert [record.status for record in tracer.records] == ["INTERNAL"]


async def test_a_grpc_client_that_leaves_is_no_bug(stub, bench, tracer):
    bench.backend.gate = asyncio.Semaphore(1)
    call = stub.GenerateStream(REQUEST)
    await call.read()
    call.cancel()
    await until(lambda: bench.metrics.named("finished"))
    assert [reason for reason, _ in bench.metrics.named("finished")] == ["abort"]
    assert bench.metrics.named("rejected") == []
    assert [record.status for record in tracer.records] == ["CANCELLED"]


@pytest.mark.parametrize("how", [{}, {"stream": True}, {"background": True}])
async def test_a_bug_before_an_answer_leaves_nothing_running(
    client, bench, services, monkeypatch, how
):
    def broken(*_):
        raise RuntimeError("secret detail")

    monkeypatch.setattr(model_routes.CompletionRenderer, "__init__", broken)
    monkeypatch.setattr(keeping, "Draft", broken)
    bench.backend.gate = asyncio.Semaphore(0)
    asked = {"model": "tiny", "input": "hi", **how}
    completion = COMPLETION | {"stream": "stream" in how}
    for path, body in (("/v1/responses", asked), ("/v1/completions", completion)):
        answer = await client.post(path, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
    assert len(bench.backend.streams) == 2
    assert bench.backend.num_live == 0
    assert [reason for reason, _ in bench.metrics.named("finished")] == ["internal"] * 2
