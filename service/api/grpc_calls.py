"""What surrounds every gRPC call: its context, its key and its admission before its message is
read; its typed end afterwards.

Every method reads and writes by itself, which on the wire looks as its kind in the proto says.
Messages arrive as bytes and are parsed here, so that malformed ones are the client's error and not
the server's. Knows no method by name but the open ones.
"""

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from service.api.grpc_calls_under_way import CallsUnderWay
from service.api.grpc_doorkeeper import Doorkeeper
from service.api.grpc_status import GRPC_STATUS
from service.api.grpc_wire import check_wire
from service.api.services import ApiServices
from service.errors import ApiError, ApiErrorCode
from service.observability.request_log.observer import choose_request_id
from service.observability.request_log.record import RequestRecord
from service.request_context import RequestContext
from service.security.callers import Caller
from service.security.connections import GrpcConnectionLimits
from service.security.quota import FreeLease, Lease

HEALTH_PREFIX = "/grpc.health.v1.Health/"
REFLECTION_PREFIXES = (
    "/grpc.reflection.v1alpha.ServerReflection/",
    "/grpc.reflection.v1.ServerReflection/",
)
# After a message of so many bytes has been parsed others have their turn.
_LARGE_BYTES = 64 << 10
Q = TypeVar("Q", bound=Message)
# The stubs make these generic, the classes themselves are not.
Rpc: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
_log = logging.getLogger(__name__)


class UnreadAnswerError(Exception):
    """The client has left no room for the next answer for too long."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call that was let in. lease: whoever runs it ends it."""

    context: RequestContext
    lease: Lease
    rpc: Rpc
    limits: GrpcConnectionLimits

    async def read(self) -> bytes:
        """The call's message. Raises ApiError if there is none, or not in time."""
        try:
            async with asyncio.timeout(self.limits.receive_timeout_s):
                data = await self.rpc.read()
        except TimeoutError as error:
            message = "the call's message did not arrive in time"
            raise ApiError(ApiErrorCode.REQUEST_TIMEOUT, message) from error
        if not isinstance(data, bytes):
            raise ApiError(ApiErrorCode.INVALID_REQUEST, "the call has no message")
        return data

    async def write(self, answer: Message) -> None:
        """Send an answer; returns when the client has room for the next.

        Raises UnreadAnswerError if it has none for too long.
        """
        await self.write_bytes(answer.SerializeToString())

    async def write_bytes(self, answer: bytes) -> None:
        """As write(), of a serialised answer."""
        try:
            async with asyncio.timeout(self.limits.write_timeout_s):
                await self.rpc.write(answer)
        except TimeoutError as error:
            raise UnreadAnswerError from error
        except grpc.aio.InternalError as error:
            # The connection went before gRPC had cancelled the call.
            raise asyncio.CancelledError from error


class Method(grpc.RpcMethodHandler, Generic[Q]):  # type: ignore[type-arg]
    """One method of ours. run: writes every answer, and may raise ApiError.

    is_generation: what admission control refuses is refused before its message is read.
    is_counted: calls count as requests of their key. max_tokens: ids that a message may hold.
    """

    def __init__(
        self,
        request_type: type[Q],
        run: Callable[[Q, Call], Awaitable[None]],
        max_tokens: int,
        *,
        is_generation: bool = False,
        is_counted: bool = True,
    ) -> None:
        self._request_type = request_type
        self._run = run
        self._max_tokens = max_tokens
        self.is_generation = is_generation
        self.is_counted = is_counted

    async def __call__(self, call: Call) -> None:
        request = await parse(self._request_type, await call.read(), self._max_tokens)
        await self._run(request, call)


class MethodHandlers(grpc.GenericRpcHandler):  # type: ignore[type-arg]
    """The methods of one service, for CallInterceptor to call."""

    def __init__(self, service_name: str, methods: Mapping[str, Method[Any]]) -> None:
        self._methods = {f"/{service_name}/{name}": method for name, method in methods.items()}

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "MethodHandler | None":
        return self._methods.get(handler_call_details.method)


async def abort(rpc: Rpc, error: ApiError, record: RequestRecord) -> NoReturn:
    """End a call with the status of the error and its code and parameter as trailing metadata.

    record: of the request that ends so.
    """
    status = GRPC_STATUS[error.code]
    record.error_code, record.status = error.code.value, status.name
    metadata = [("tessera-error-code", error.code.value)]
    if error.param is not None:
        metadata.append(("tessera-error-param", error.param.encode("ascii", "replace").decode()))
    if error.retry_after_s is not None:
        metadata.append(("retry-after", str(math.ceil(error.retry_after_s))))
    await rpc.abort(status, error.message, tuple(metadata))


class CallInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """The only interceptor: what it lets through without a look is health and open reflection."""

    def __init__(
        self,
        services: ApiServices,
        limits: GrpcConnectionLimits,
        doorkeeper: Doorkeeper,
        calls: CallsUnderWay,
        *,
        is_reflection_open: bool,
    ) -> None:
        self._services = services
        self._limits = limits
        self._doorkeeper = doorkeeper
        self._calls = calls
        self._open = (HEALTH_PREFIX, *(REFLECTION_PREFIXES if is_reflection_open else ()))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler:
        details = handler_call_details
        if details.method.startswith(self._open):
            return await continuation(details)
        caller = self._identify(details)
        handler = None if caller is None else await continuation(details)
        if not (handler is None or isinstance(handler, Method)):
            return handler
        metadata = _text_metadata(details)
        context = self._make_context(details.method, metadata)
        if caller is not None:
            context = context.of_caller(caller)
            if handler is None:
                self._end_unknown(context.record, metadata)
                return handler  # type: ignore[return-value]  # gRPC itself answers UNIMPLEMENTED

        # gRPC wants a coroutine function. It may never call it: nothing has been taken so far.
        async def call(_: object, rpc: Rpc) -> None:
            await self._serve(handler, context, metadata, rpc)

        # A handler of this kind is called before anything has been read.
        return grpc.stream_stream_rpc_method_handler(call)

    def _make_context(self, method: str, metadata: Mapping[str, str]) -> RequestContext:
        request_id = choose_request_id(metadata.get("x-request-id", ""))
        return RequestContext(
            record=RequestRecord(request_id, "grpc", route=method, status="CANCELLED"),
            session=metadata.get(self._services.session_header, ""),
        )

    def _identify(self, details: grpc.HandlerCallDetails) -> Caller | None:
        values = [
            value for key, value in details.invocation_metadata or () if key == "authorization"
        ]
        authorization = values[0] if len(values) == 1 else None
        if isinstance(authorization, bytes):
            authorization = authorization.decode("ascii", "replace")
        return self._services.authenticator.identify(authorization)

    def _end_unknown(self, record: RequestRecord, metadata: Mapping[str, str]) -> None:
        self._services.begin(record, metadata)
        record.route, record.status = "unmatched", "UNIMPLEMENTED"
        record.error_code = ApiErrorCode.ROUTE_NOT_FOUND.value
        self._services.end(record)

    async def _serve(
        self,
        method: "Method[Any] | None",
        context: RequestContext,
        metadata: Mapping[str, str],
        rpc: Rpc,
    ) -> None:
        """method: None refuses a call that has no key."""
        record = context.record
        self._services.begin(record, metadata)
        try:
            if method is None:
                await self._doorkeeper.end(rpc.peer(), _refuse(rpc, record))
                return
            self._calls.enter(rpc)
            with self._doorkeeper.serving(rpc.peer()):
                await rpc.send_initial_metadata(_initial_metadata(record))
                await self._admit(method, context, rpc)
            record.status = "OK"
        except ApiError as error:
            await self._end(rpc, error, record)
        except UnreadAnswerError:
            unread = ApiError(ApiErrorCode.TIMEOUT, "the answers were not read in time")
            await self._end(rpc, unread, record)
        except grpc.aio.BaseError:
            # An abort, or the client or the server has gone: gRPC knows what to do.
            raise
        except Exception as error:  # noqa: BLE001 - the process boundary
            _log.error("a gRPC call failed", exc_info=error)
            bug = ApiError(ApiErrorCode.INTERNAL, "an internal error occurred")
            await self._end(rpc, bug, record)
        finally:
            self._services.end(record)

    async def _end(self, rpc: Rpc, error: ApiError, record: RequestRecord) -> None:
        await self._doorkeeper.end(rpc.peer(), abort(rpc, error, record))

    async def _admit(self, method: Method[Any], context: RequestContext, rpc: Rpc) -> None:
        if not method.is_counted:
            await method(Call(context, FreeLease(), rpc, self._limits))
            return
        models = self._services.models
        if method.is_generation:
            models.check_admission()
        with models.admitting(context.caller) as lease:
            await method(Call(context, lease, rpc, self._limits))
            lease.end(0)  # unless a generation has ended it


async def _refuse(rpc: Rpc, record: RequestRecord) -> None:
    # On the wire a refusal is the same for calls of every kind, known method or not.
    await rpc.send_initial_metadata(_initial_metadata(record))
    error = ApiError(ApiErrorCode.INVALID_API_KEY, "a valid API key is required")
    await abort(rpc, error, record)


def _initial_metadata(record: RequestRecord) -> tuple[tuple[str, str], ...]:
    metadata = (("x-request-id", record.request_id),)
    if record.span.traceparent:
        return (*metadata, ("traceparent", record.span.traceparent))
    return metadata


def _text_metadata(details: grpc.HandlerCallDetails) -> dict[str, str]:
    """The first text of each key."""
    given = tuple(details.invocation_metadata or ())
    return {key: value for key, value in reversed(given) if isinstance(value, str)}


async def parse(request_type: type[Q], data: bytes, max_tokens: int) -> Q:
    """max_tokens: ids that a request may hold. Raises ApiError."""
    await check_wire(data, request_type.DESCRIPTOR, max_tokens)
    try:
        request = request_type.FromString(data)
    except DecodeError as error:
        raise ApiError(
            ApiErrorCode.INVALID_REQUEST, f"the message is not a {request_type.DESCRIPTOR.name}"
        ) from error
    if len(data) > _LARGE_BYTES:
        await asyncio.sleep(0)
    return request
