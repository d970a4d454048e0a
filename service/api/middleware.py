"""Plain ASGI middleware: each request's context, API keys on the raw path, a ceiling on bodies.

Plain ASGI because Starlette's BaseHTTPMiddleware buffers streams. Knows no route but health and
what is polled.
"""

import logging
from collections.abc import Sequence, Set

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.auth import Authenticator
from service.api.error_shapes import is_anthropic
from service.api.http_replies import error_response
from service.api.live_routes import POLLED_PATHS
from service.api.services import ApiServices
from service.errors import ApiError, ApiErrorCode
from service.observability.request_log.observer import choose_request_id
from service.observability.request_log.record import RequestRecord
from service.request_context import RequestContext

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"})
UNMATCHED = "unmatched"
_ID_HEADERS = ("x-request-id",)
_ANTHROPIC_ID_HEADERS = ("x-request-id", "request-id")
_CONTEXT_KEY = "tessera.context"
_log = logging.getLogger(__name__)


def context_of(scope: Scope) -> RequestContext:
    """Of a request that has passed ContextMiddleware."""
    context: RequestContext = scope[_CONTEXT_KEY]
    return context


def record_of(scope: Scope) -> RequestRecord:
    return context_of(scope).record


class ContextMiddleware:
    """The outermost: makes each request's context, observes the request, answers for bugs.

    Takes x-request-id if it is well-formed, else draws one, and returns it on every response.
    Health and the page's files are neither logged nor traced nor counted; of what is polled,
    refusals are counted.
    """

    def __init__(self, app: ASGIApp, services: ApiServices) -> None:
        self._app = app
        self._services = services
        self._unobserved = OPEN_PATHS | services.web.page.keys()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        record = RequestRecord(
            choose_request_id(headers.get("x-request-id", "")), "http", scope["method"]
        )
        session = headers.get(self._services.session_header, "")
        scope[_CONTEXT_KEY] = RequestContext(record=record, session=session)
        id_headers = _ANTHROPIC_ID_HEADERS if is_anthropic(scope["path"]) else _ID_HEADERS
        answer = _Answer(record, id_headers, send)
        if scope["path"] in self._unobserved:
            await self._answer(scope, receive, answer)
            return
        if scope["path"] in POLLED_PATHS:
            await self._answer(scope, receive, answer)
            self._services.models.count_refusal(record)
            return
        self._services.begin(record, headers)
        try:
            await self._answer(scope, receive, answer)
        finally:
            # The routed path with its placeholders: what a client made up is not repeated.
            record.route = getattr(scope.get("route"), "path", UNMATCHED)
            self._services.end(record)

    async def _answer(self, scope: Scope, receive: Receive, answer: "_Answer") -> None:
        try:
            await self._app(scope, receive, answer.send)
        except Exception as bug:
            record = answer.record
            _log.error("request %s failed", record.request_id, exc_info=bug)
            response = error_response(_internal_error(), record, scope["path"])
            if record.status:
                raise  # The response has begun: the server cuts it off.
            await response(scope, receive, answer.send)


class _Answer:
    """Sends a response with the ids of its request, whose record learns the status."""

    def __init__(self, record: RequestRecord, id_headers: Sequence[str], send: Send) -> None:
        self.record = record
        self._id_headers = id_headers
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.record.status = str(message["status"])
            headers = MutableHeaders(scope=message)
            for name in self._id_headers:
                headers[name] = self.record.request_id
            if self.record.span.traceparent:
                headers["traceparent"] = self.record.span.traceparent
        await self._send(message)


def _internal_error() -> ApiError:
    return ApiError(ApiErrorCode.INTERNAL, "an internal error occurred")


class AuthMiddleware:
    """Refuses whoever has no key, on every path but open ones, known or not; names the others."""

    def __init__(
        self, app: ASGIApp, authenticator: Authenticator, open_paths: Set[str] = OPEN_PATHS
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            caller = self._authenticator.identify(_authorization_of(Headers(scope=scope)))
            if caller is None:
                error = ApiError(ApiErrorCode.INVALID_API_KEY, "a valid API key is required")
                response = error_response(error, record_of(scope), scope["path"])
                await response(scope, receive, send)
                return
            scope[_CONTEXT_KEY] = context_of(scope).of_caller(caller)
        await self._app(scope, receive, send)


def _authorization_of(headers: Headers) -> str | None:
    """Anthropic's clients send their key by itself; it counts where there is no authorization."""
    authorization, key = headers.get("authorization"), headers.get("x-api-key")
    return f"Bearer {key}" if authorization is None and key is not None else authorization


class BodyLimitMiddleware:
    """Stops reading a body at the ceiling, whatever its Content-Length says."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self._app = app
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._max_body_bytes:
            error = self._too_large()
            response = error_response(error, record_of(scope), scope["path"])
            await response(scope, receive, send)
            return
        num_bytes = 0

        async def receive_limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_body_bytes:
                    raise self._too_large()
            return message

        await self._app(scope, receive_limited, send)

    def _too_large(self) -> ApiError:
        return ApiError(
            ApiErrorCode.PAYLOAD_TOO_LARGE,
            f"the body may have at most {self._max_body_bytes} bytes",
        )
