"""The HTTP API: the routes of models, health, what surrounds them, and errors.

Built from injected collaborators; knows no Ray and no replica.
"""

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response

from service.api.errors import ApiError, ApiErrorCode
from service.api.middleware import (
    OPEN_PATHS,
    REQUEST_ID_KEY,
    AuthMiddleware,
    BodyLimitMiddleware,
    OnRefused,
    RequestIdMiddleware,
    SessionMiddleware,
)
from service.api.model_routes import add_model_routes
from service.api.openapi import install_openapi
from service.api.responses import error_response, json_response
from service.api.services import ApiServices
from service.request_log.http import ObservingMiddleware

_log = logging.getLogger(__name__)


def build_http_app(services: ApiServices) -> FastAPI:
    """The ASGI application. Serve it with a server that limits header sizes."""
    app = FastAPI(title="Tessera", version=services.version, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    add_model_routes(app, services)
    _add_version_route(app, services.version)
    _add_health_routes(app, services)
    models = services.models
    _add_error_handlers(app, models.count_refusal)
    app.add_middleware(SessionMiddleware, header=services.session_header)
    # The last one added is the outermost: ids come first, then keys, then bodies.
    app.add_middleware(
        BodyLimitMiddleware,
        max_body_bytes=models.limits.max_body_bytes,
        on_refused=models.count_refusal,
    )
    app.add_middleware(
        AuthMiddleware, authenticator=services.authenticator, on_refused=models.count_refusal
    )
    app.add_middleware(
        ObservingMiddleware,
        observer=services.observer,
        request_id_key=REQUEST_ID_KEY,
        quiet_paths=OPEN_PATHS,
    )
    app.add_middleware(RequestIdMiddleware)
    install_openapi(app)
    return app


def _add_version_route(app: FastAPI, version: str) -> None:
    @app.get("/version")
    async def show_version() -> Response:
        return json_response({"version": version})


def _add_health_routes(app: FastAPI, services: ApiServices) -> None:
    @app.get("/health/live")
    async def live() -> Response:
        return json_response({"status": "live"})

    @app.get("/health/ready")
    async def ready() -> Response:
        if not services.is_ready():
            raise ApiError(ApiErrorCode.UNAVAILABLE, "not ready to serve requests")
        return json_response({"status": "ready"})


_CODE_OF_STATUS = {
    404: ApiErrorCode.ROUTE_NOT_FOUND,
    405: ApiErrorCode.METHOD_NOT_ALLOWED,
    413: ApiErrorCode.PAYLOAD_TOO_LARGE,
}


def _add_error_handlers(app: FastAPI, on_refused: OnRefused) -> None:
    """on_refused: told of requests that reach no route; routes count their own refusals."""

    async def on_api_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            raise error
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, StarletteHTTPException):
            raise error
        code = _CODE_OF_STATUS.get(error.status_code, ApiErrorCode.INVALID_REQUEST)
        refusal = ApiError(code, str(error.detail))
        on_refused(refusal)
        response = error_response(refusal)
        response.headers.update(error.headers or {})
        return response

    async def on_bug(request: Request, error: Exception) -> Response:
        request_id: Any = request.scope.get(REQUEST_ID_KEY)
        _log.error("request %s failed", request_id, exc_info=error)
        return error_response(ApiError(ApiErrorCode.INTERNAL, "an internal error occurred"))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(StarletteHTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
