"""What surrounds every gRPC call: API keys and sessions before it, typed errors after it.

Requests arrive as bytes and are parsed here, so that malformed ones are the client's error and not
the server's. Knows no method by name but the open ones.
"""

import logging
import math
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AbstractContextManager, aclosing
from typing import Any, NoReturn, TypeAlias, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message

from service.api.auth import Authenticator
from service.api.errors import ApiError, ApiErrorCode
from service.api.grpc_requests import check_message
from service.request_log.record import current_record
from service.security.callers import Caller, set_caller
from service.session import set_session_name

HEALTH_PREFIX = "/grpc.health.v1.Health/"
REFLECTION_PREFIXES = (
    "/grpc.reflection.v1alpha.ServerReflection/",
    "/grpc.reflection.v1.ServerReflection/",
)
Q = TypeVar("Q", bound=Message)
A = TypeVar("A", bound=Message)
# The stubs make these generic, the classes themselves are not.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
MethodHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Counting: TypeAlias = Callable[[], AbstractContextManager[None]]
_log = logging.getLogger(__name__)


def unary_handler(
    request_type: type[Q], method: Callable[[Q], Awaitable[A]], counting_refusals: Counting
) -> MethodHandler:
    """counting_refusals: around the parsing of a message."""

    async def call(data: bytes, context: Context) -> A:
        try:
            with counting_refusals():
                request = _parse(request_type, data)
            return await method(request)
        except ApiError as error:
            await abort(context, error)
        except Exception as error:  # noqa: BLE001 - the process boundary
            await _abort_for_bug(context, error)

    return grpc.unary_unary_rpc_method_handler(call, response_serializer=_serialize)


def stream_handler(
    request_type: type[Q],
    method: Callable[[Q], AsyncGenerator[A, None]],
    counting_refusals: Counting,
) -> MethodHandler:
    """As unary_handler, for a method with many answers."""

    async def call(data: bytes, context: Context) -> AsyncIterator[A]:
        try:
            with counting_refusals():
                request = _parse(request_type, data)
            async with aclosing(method(request)) as answers:
                async for answer in answers:
                    yield answer
        except ApiError as error:
            await abort(context, error)
        except Exception as error:  # noqa: BLE001 - the process boundary
            await _abort_for_bug(context, error)

    return grpc.unary_stream_rpc_method_handler(call, response_serializer=_serialize)


async def abort(context: Context, error: ApiError) -> NoReturn:
    """End a call with the status of the error and its code and parameter as trailing metadata."""
    current_record().error_code = error.code.value
    metadata = [("tessera-error-code", error.code.value)]
    if error.param is not None:
        metadata.append(("tessera-error-param", error.param.encode("ascii", "replace").decode()))
    if error.retry_after_s is not None:
        metadata.append(("retry-after", str(math.ceil(error.retry_after_s))))
    await context.abort(error.row.grpc_status, error.message, tuple(metadata))


async def _abort_for_bug(context: Context, error: Exception) -> NoReturn:
    _log.error("a gRPC call failed", exc_info=error)
    await abort(context, ApiError(ApiErrorCode.INTERNAL, "an internal error occurred"))


def _parse(request_type: type[Q], data: bytes) -> Q:
    try:
        request = request_type.FromString(data)
    except DecodeError as error:
        raise ApiError(
            ApiErrorCode.INVALID_REQUEST, f"the message is not a {request_type.DESCRIPTOR.name}"
        ) from error
    check_message(request)
    return request


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


class AuthInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Refuses whoever has no key, on every method but health and, where open, reflection."""

    def __init__(
        self,
        authenticator: Authenticator,
        on_refused: Callable[[ApiError], None],
        *,
        is_reflection_open: bool,
    ) -> None:
        self._authenticator = authenticator
        self._on_refused = on_refused
        self._open = (HEALTH_PREFIX, *(REFLECTION_PREFIXES if is_reflection_open else ()))

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler:
        if handler_call_details.method.startswith(self._open):
            return await continuation(handler_call_details)
        caller = self._identify(handler_call_details)
        if caller is not None:
            # gRPC runs the call in the task, and so in the context, that runs its interceptors.
            set_caller(caller)
            handler = await continuation(handler_call_details)
            if handler is None:
                # gRPC itself answers UNIMPLEMENTED.
                self._on_refused(ApiError(ApiErrorCode.ROUTE_NOT_FOUND, "no such method"))  # type: ignore[unreachable]
            return handler
        # On the wire a refusal is the same for calls of every kind, known method or not.
        return grpc.stream_stream_rpc_method_handler(self._refuse)

    def _identify(self, details: grpc.HandlerCallDetails) -> Caller | None:
        values = [
            value for key, value in details.invocation_metadata or () if key == "authorization"
        ]
        authorization = values[0] if len(values) == 1 else None
        if isinstance(authorization, bytes):
            authorization = authorization.decode("ascii", "replace")
        return self._authenticator.identify(authorization)

    async def _refuse(self, _: Any, context: Context) -> AsyncIterator[bytes]:
        error = ApiError(ApiErrorCode.INVALID_API_KEY, "a valid API key is required")
        self._on_refused(error)
        await abort(context, error)
        yield b""  # type: ignore[unreachable]  # makes this an async generator


class SessionInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Takes the name of the call's session from the metadata of that key. After AuthInterceptor."""

    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[MethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> MethodHandler:
        names = (
            value
            for key, value in handler_call_details.invocation_metadata or ()
            if key == self._key and isinstance(value, str)
        )
        set_session_name(next(names, ""))
        return await continuation(handler_call_details)
