"""Spans of HTTP and gRPC requests through the real handler on a fake backend."""

import asyncio
import contextvars
import dataclasses
import time

import grpc
import httpx
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, TraceFlags

from service.api.auth import OpenAuthenticator
from service.api.grpc import build_grpc_server
from service.api.http import build_http_app
from service.api.services import ApiServices
from service.observability.request_log.observer import NoTracing, RequestObserver
from service.observability.request_log.record import ChoiceTimes, RequestRecord, RouteTimes
from service.observability.tracing import settings as tracing_settings
from service.observability.tracing.otel import OtelTracer, make_provider
from service.observability.tracing.settings import TracingSettings
from service.observability.tracing.tracer import make_tracer
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.backend import make_failure
from tests.fakes.text import ANSWER, make_bench
from workers.errors import ConfigError, ErrorCode

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PARENT_ID = "b7ad6b7169203331"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"
ENGINE = ["tessera.engine.queue", "tessera.engine.prefill", "tessera.engine.decode"]


class Traced:
    """A service whose spans are kept in memory."""

    def __init__(self, folder, script=None, sample_ratio=1.0):
        self.bench = make_bench(folder, script)
        self.exporter = InMemorySpanExporter()
        provider = make_provider(TracingSettings(sample_ratio=sample_ratio), "ingress-1")
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.services = ApiServices(
            models=self.bench.models,
            authenticator=OpenAuthenticator(),
            is_ready=lambda: True,
            version="0.1.0",
            started_s=0,
            peek_s=0.2,
            observer=RequestObserver(OtelTracer(provider), is_access_log_enabled=False),
        )

    def spans(self):
        return {span.name: span for span in self.exporter.get_finished_spans()}

    async def post(self, path, headers=None, **body):
        transport = httpx.ASGITransport(app=build_http_app(self.services))
        async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
            return await client.post(path, json={"model": "tiny", **body}, headers=headers or {})


def _assert_tree(spans, root):
    channel = spans["tessera.channel"]
    assert channel.parent.span_id == root.context.span_id
    assert all(spans[name].parent.span_id == channel.context.span_id for name in ENGINE)
    assert {span.context.trace_id for span in spans.values()} == {root.context.trace_id}
    queue, prefill, decode = (spans[name] for name in ENGINE)
    assert channel.start_time <= queue.start_time <= queue.end_time == prefill.start_time
    assert prefill.end_time == decode.start_time <= decode.end_time == channel.end_time
    assert root.start_time <= channel.start_time
    assert channel.end_time <= root.end_time


@pytest.mark.asyncio
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_http_request_is_one_tree_below_its_caller(tmp_path, is_stream):
    traced = Traced(tmp_path)
    response = await traced.post(
        "/v1/completions", {"traceparent": PARENT}, prompt="hello", max_tokens=50, stream=is_stream
    )
    spans = traced.spans()
    root = spans["POST /v1/completions"]
    _assert_tree(spans, root)
    assert root.kind is SpanKind.SERVER
    assert (f"{root.context.trace_id:032x}", f"{root.parent.span_id:016x}") == (TRACE_ID, PARENT_ID)
    assert response.headers["traceparent"] == f"00-{TRACE_ID}-{root.context.span_id:016x}-01"
    shown = root.attributes
    assert shown["http.response.status_code"] == 200
    assert shown["gen_ai.request.model"] == "tiny"
    assert shown["gen_ai.usage.input_tokens"] == len(traced.bench.tokenizer.ids("hello"))
    assert shown["gen_ai.usage.output_tokens"] == len(traced.bench.tokenizer.ids(ANSWER)) + 1
    assert shown["gen_ai.response.finish_reasons"] == ("stop",)
    assert shown["tessera.request.id"] == response.headers["x-request-id"]


@pytest.mark.asyncio
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_grpc_call_is_one_tree_below_its_caller(tmp_path, is_stream):
    traced = Traced(tmp_path)
    server, port = build_grpc_server(traced.services, "127.0.0.1:0")
    await server.start()
    request = pb.GenerateRequest(
        text=pb.Text(text="hello"), sampling=pb.SamplingParams(max_tokens=50)
    )
    metadata = (("traceparent", PARENT), ("x-request-id", "call-7"))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.InferenceStub(channel)
        if is_stream:
            call = stub.GenerateStream(request, metadata=metadata)
            assert [chunk async for chunk in call]
        else:
            call = stub.Generate(request, metadata=metadata)
            await call
        answered = dict(await call.initial_metadata())
    await server.stop(None)
    spans = traced.spans()
    method = "GenerateStream" if is_stream else "Generate"
    root = spans[f"/tessera.v1.Inference/{method}"]
    _assert_tree(spans, root)
    assert f"{root.parent.span_id:016x}" == PARENT_ID
    assert answered["x-request-id"] == "call-7"
    assert answered["traceparent"] == f"00-{TRACE_ID}-{root.context.span_id:016x}-01"
    assert root.attributes["rpc.method"] == method
    assert root.attributes["tessera.grpc.status"] == "OK"


@pytest.mark.asyncio
async def test_a_failure_of_the_engine_is_an_error_of_its_spans(tmp_path):
    traced = Traced(tmp_path, lambda request: [make_failure(request, ErrorCode.INTERNAL, "broken")])
    response = await traced.post("/v1/completions", prompt="hello", max_tokens=5)
    assert response.status_code == 500
    spans = traced.spans()
    root = spans["POST /v1/completions"]
    assert root.status.status_code is StatusCode.ERROR
    assert root.attributes["error.type"] == "internal"
    assert spans["tessera.channel"].status.status_code is StatusCode.ERROR
    assert not set(ENGINE) & set(spans)


@pytest.mark.asyncio
async def test_what_a_client_did_wrong_is_named_but_no_error_of_the_server(tmp_path):
    traced = Traced(tmp_path)
    await traced.post("/v1/completions", prompt="hello", max_tokens=-1)
    (root,) = traced.exporter.get_finished_spans()
    assert root.status.status_code is StatusCode.UNSET
    assert root.attributes["error.type"]
    assert root.attributes["http.response.status_code"] == 400


@pytest.mark.asyncio
async def test_a_client_that_leaves_its_stream_ends_its_spans(tmp_path):
    traced = Traced(tmp_path)
    traced.bench.backend.gate = asyncio.Semaphore(2)
    server, port = build_grpc_server(traced.services, "127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = pb_grpc.InferenceStub(channel).GenerateStream(
            pb.GenerateRequest(
                text=pb.Text(text="hello"), sampling=pb.SamplingParams(max_tokens=50)
            )
        )
        await call.read()
        call.cancel()
        end_s = time.monotonic() + 5
        while "/tessera.v1.Inference/GenerateStream" not in traced.spans():
            assert time.monotonic() < end_s
            await asyncio.sleep(0.01)
    await server.stop(None)
    spans = traced.spans()
    assert spans["/tessera.v1.Inference/GenerateStream"].attributes["tessera.grpc.status"] == (
        "CANCELLED"
    )
    assert spans["tessera.channel"].attributes["tessera.finish_reason"] == "abort"


@pytest.mark.asyncio
async def test_a_ratio_of_zero_samples_nothing_of_its_own(tmp_path):
    traced = Traced(tmp_path, sample_ratio=0.0)
    response = await traced.post("/v1/completions", prompt="hello", max_tokens=5)
    assert traced.spans() == {}
    flags = int(response.headers["traceparent"].rpartition("-")[2], 16)
    assert not flags & TraceFlags.SAMPLED


@pytest.mark.asyncio
@pytest.mark.parametrize("header", ["", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
async def test_a_malformed_parent_begins_a_trace_of_its_own(tmp_path, header):
    traced = Traced(tmp_path)
    await traced.post("/v1/completions", {"traceparent": header}, prompt="hi", max_tokens=5)
    assert traced.spans()["POST /v1/completions"].parent is None


@pytest.mark.asyncio
async def test_without_tracing_no_header_and_no_span_is_made(tmp_path):
    traced = Traced(tmp_path)
    silent = RequestObserver(NoTracing(), is_access_log_enabled=False)
    traced.services = dataclasses.replace(traced.services, observer=silent)
    response = await traced.post("/v1/completions", prompt="hello", max_tokens=5)
    assert "traceparent" not in response.headers
    assert traced.spans() == {}


def test_every_attempt_of_the_router_is_a_span(tmp_path):
    traced = Traced(tmp_path)
    record = _record()
    record.add_route(RouteTimes("replica-b", "lost", 0.0, 0.1, is_move=True))
    observer = traced.services.observer

    def observe():
        observer.begin(record)
        observer.end(record)

    contextvars.Context().run(observe)
    routes = [s for s in traced.exporter.get_finished_spans() if s.name == "tessera.route"]
    told = [
        (s.attributes["tessera.replica.id"], s.attributes["tessera.routing.reason"]) for s in routes
    ]
    assert told == [("replica-a", "prefix"), ("replica-b", "lost")]


def test_tracing_without_its_packages_is_a_typed_error(monkeypatch):
    monkeypatch.setattr(tracing_settings, "_PACKAGES", ("no_such_package.trace",))
    with pytest.raises(ConfigError, match=r"tessera\[tracing\]"):
        make_tracer(TracingSettings(is_enabled=True), "ingress-1")
    assert isinstance(make_tracer(TracingSettings(), "ingress-1"), NoTracing)


def _record():
    record = RequestRecord("r", "http", "POST", "/v1/completions", "200", model="tiny")
    now_s = record.started_s
    record.add_route(RouteTimes("replica-a", "prefix", now_s, now_s))
    record.choices.append(ChoiceTimes(now_s, now_s, now_s, 0.0, 0.0, "stop", 8))
    return record


def _us_per_request(observer, count=2000):
    started_s = time.perf_counter()
    for _ in range(count):
        record = _record()
        observer.begin(record, PARENT)
        observer.end(record)
    return (time.perf_counter() - started_s) / count * 1e6


def test_what_a_traced_request_costs_is_bounded(tmp_path, capsys):
    """Prints the cost. The bound leaves room for a machine that is busy with other tests."""
    traced = Traced(tmp_path)
    off = contextvars.Context().run(
        _us_per_request, RequestObserver(NoTracing(), is_access_log_enabled=False)
    )
    on = contextvars.Context().run(_us_per_request, traced.services.observer)
    with capsys.disabled():
        print(f"\nus a request: {off:.1f} without tracing, {on:.1f} with all six spans")
    assert off < on < 5000
