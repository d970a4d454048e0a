"""gRPC interceptor that observes the calls of one service. Knows no method."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio

from service.request_log.observer import RequestObserver, choose_request_id
from service.request_log.record import RequestRecord

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class ObservingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The first interceptor. prefix: of the methods to observe, such as "/package.Service/"."""

    def __init__(self, observer: RequestObserver, prefix: str) -> None:
        self._observer = observer
        self._prefix = prefix

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler:
        method = handler_call_details.method
        if not method.startswith(self._prefix):
            return await continuation(handler_call_details)
        metadata = {
            key: value
            for key, value in handler_call_details.invocation_metadata or ()
            if isinstance(value, str)
        }
        request_id = choose_request_id(metadata.get("x-request-id", ""))
        record = self._observer.begin(
            RequestRecord(request_id, "grpc"),
            metadata.get("traceparent", ""),
            metadata.get("tracestate", ""),
        )
        handler = await continuation(handler_call_details)
        if handler is None:
            record.route, record.status = "unmatched", "UNIMPLEMENTED"  # type: ignore[unreachable]
            self._observer.end(record)
            return handler
        record.route = method
        return self._observed(handler, record)

    def _observed(self, handler: MethodHandler, record: RequestRecord) -> MethodHandler:
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(
                self._one_answer(handler.unary_unary, record),
                handler.request_deserializer,
                handler.response_serializer,
            )
        if handler.unary_stream is not None:
            return grpc.unary_stream_rpc_method_handler(
                self._many_answers(handler.unary_stream, record),
                handler.request_deserializer,
                handler.response_serializer,
            )
        return grpc.stream_stream_rpc_method_handler(
            self._many_answers(handler.stream_stream, record),
            handler.request_deserializer,
            handler.response_serializer,
        )

    def _one_answer(self, method: Any, record: RequestRecord) -> Any:
        async def call(request: Any, context: Context) -> Any:
            record.status = "CANCELLED"  # until it ends otherwise
            try:
                await context.send_initial_metadata(_initial_metadata(record))
                answer = await method(request, context)
                record.status = "OK"
                return answer
            except grpc.aio.AbortError:
                record.status = _status_name(context)
                raise
            except Exception:
                # A bug: gRPC itself answers UNKNOWN.
                record.status = "UNKNOWN"
                raise
            finally:
                self._observer.end(record)

        return call

    def _many_answers(self, method: Any, record: RequestRecord) -> Any:
        async def call(request: Any, context: Context) -> AsyncIterator[Any]:
            record.status = "CANCELLED"
            answers = method(request, context)
            try:
                await context.send_initial_metadata(_initial_metadata(record))
                async for answer in answers:
                    yield answer
                record.status = "OK"
            except grpc.aio.AbortError:
                record.status = _status_name(context)
                raise
            except Exception:
                # A bug: gRPC itself answers UNKNOWN.
                record.status = "UNKNOWN"
                raise
            finally:
                await answers.aclose()
                self._observer.end(record)

        return call


def _initial_metadata(record: RequestRecord) -> tuple[tuple[str, str], ...]:
    metadata = (("x-request-id", record.request_id),)
    if record.span.traceparent:
        return (*metadata, ("traceparent", record.span.traceparent))
    return metadata


def _status_name(context: Context) -> str:
    code: Any = context.code()
    names = {status.value[0]: status.name for status in grpc.StatusCode}
    return names.get(code, "UNKNOWN") if isinstance(code, int) else str(code.name)
