"""What the record of a gRPC call says when its method raises."""

from types import SimpleNamespace

import grpc
import pytest

from service.request_log.grpc import ObservingInterceptor
from service.request_log.observer import RequestObserver
from service.request_log.record import NO_SPAN, RequestRecord

METHOD = "/package.Service/Method"


class KeepingTracer:
    def __init__(self) -> None:
        self.records: list[RequestRecord] = []

    def begin(self, record, traceparent, tracestate):
        self.records.append(record)
        return NO_SPAN

    def close(self) -> None:
        """Nothing was sent."""


class Context:
    async def send_initial_metadata(self, metadata) -> None:
        """Nobody reads it."""


async def broken(request, context):
    raise ValueError("a bug")


async def broken_stream(request, context):
    yield "one"
    raise ValueError("a bug")


async def handler_of(method_handler, tracer):
    async def continuation(details):
        return method_handler

    observer = RequestObserver(tracer, is_access_log_enabled=False)
    details = SimpleNamespace(method=METHOD, invocation_metadata=())
    interceptor = ObservingInterceptor(observer, "/package.Service/")
    return await interceptor.intercept_service(continuation, details)


@pytest.mark.asyncio
async def test_a_bug_in_a_method_is_unknown_and_no_cancellation():
    tracer = KeepingTracer()
    handler = await handler_of(grpc.unary_unary_rpc_method_handler(broken), tracer)
    with pytest.raises(ValueError, match="a bug"):
        await handler.unary_unary("request", Context())
    assert [record.status for record in tracer.records] == ["UNKNOWN"]


@pytest.mark.asyncio
async def test_a_bug_in_a_stream_is_unknown_and_a_client_that_leaves_is_not():
    tracer = KeepingTracer()
    for _ in range(2):
        handler = await handler_of(grpc.unary_stream_rpc_method_handler(broken_stream), tracer)
        answers = handler.unary_stream("request", Context())
        assert await anext(answers) == "one"
        if len(tracer.records) == 1:
            with pytest.raises(ValueError, match="a bug"):
                await anext(answers)
        else:
            await answers.aclose()
    assert [record.status for record in tracer.records] == ["UNKNOWN", "CANCELLED"]
