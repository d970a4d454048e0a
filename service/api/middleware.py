"""Plain ASGI middleware: request ids, sessions, API keys on the raw path, and a ceiling on bodies.

Plain ASGI because Starlette's BaseHTTPMiddleware buffers streams. Knows no route but health.
"""

from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.auth import Authenticator
from service.api.errors import ApiError, ApiErrorCode
from service.api.responses import error_response
from service.request_log.observer import choose_request_id
from service.security.callers import set_caller
from service.session import set_session_name

OPEN_PATHS = frozenset({"/health/live", "/health/ready"})
REQUEST_ID_KEY = "tessera.request_id"
OnRefused = Callable[[ApiError], None]


class RequestIdMiddleware:
    """Takes x-request-id if it is well-formed, else draws one, and returns it on every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = choose_request_id(given)
        scope[REQUEST_ID_KEY] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        await self._app(scope, receive, send_with_id)


class SessionMiddleware:
    """Takes the name of the request's session from the header of that name."""

    def __init__(self, app: ASGIApp, header: str) -> None:
        self._app = app
        self._header = header

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            set_session_name(Headers(scope=scope).get(self._header, ""))
        await self._app(scope, receive, send)


class AuthMiddleware:
    """Refuses whoever has no key, on every path but health, known or not; names the others."""

    def __init__(self, app: ASGIApp, authenticator: Authenticator, on_refused: OnRefused) -> None:
        self._app = app
        self._authenticator = authenticator
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            authorization = Headers(scope=scope).get("authorization")
            caller = self._authenticator.identify(authorization)
            if caller is None:
                error = ApiError(ApiErrorCode.INVALID_API_KEY, "a valid API key is required")
                self._on_refused(error)
                await error_response(error)(scope, receive, send)
                return
            set_caller(caller)
        await self._app(scope, receive, send)


class BodyLimitMiddleware:
    """Stops reading a body at the ceiling, whatever its Content-Length says."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, on_refused: OnRefused) -> None:
        """on_refused: not told of a body that turns out too large while it is read; its reader
        gets the ApiError."""
        self._app = app
        self._max_body_bytes = max_body_bytes
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._max_body_bytes:
            error = self._too_large()
            self._on_refused(error)
            await error_response(error)(scope, receive, send)
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
