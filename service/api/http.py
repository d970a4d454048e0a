"""The HTTP API: the routes of models, health, what surrounds them, and errors.

Built from injected collaborators; knows no Ray and no replica.
"""

from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from service.api.admin_routes import ADMIN_PATHS, add_admin_routes
from service.api.http_replies import error_response, json_response
from service.api.live_routes import add_live_routes
from service.api.middleware import (
    OPEN_PATHS,
    AuthMiddleware,
    BodyLimitMiddleware,
    ContextMiddleware,
    record_of,
)
from service.api.model_routes import add_model_routes
from service.api.openapi import install_openapi
from service.api.page_routes import add_page_routes
from service.api.paths import TrailingSlashMiddleware, answer_heads
from service.api.services import ApiServices
from service.api.sleep_routes import SLEEP_PATHS, add_sleep_routes
from service.api.unknown_fields import UnknownFields
from service.errors import ApiError, ApiErrorCode
from service.security.cors import CorsSettings


def build_http_app(services: ApiServices) -> FastAPI:
    """The ASGI application. Serve it with a server that limits header sizes."""
    app = FastAPI(title="Tessera", version=services.version, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    app.state.unknown_fields = UnknownFields(services.unknown_fields)
    add_model_routes(app, services)
    _add_version_route(app, services.version)
    _add_health_routes(app, services)
    add_live_routes(app, services.web)
    if services.admin is not None:
        add_admin_routes(app, services.admin, services.models.limits)
        add_sleep_routes(app, services.admin)
    add_page_routes(app, services.web.page)
    answer_heads(app)
    _add_error_handlers(app)
    # The last one added is the outermost: paths come first, then CORS, contexts, keys, bodies.
    app.add_middleware(BodyLimitMiddleware, max_body_bytes=services.models.limits.max_body_bytes)
    app.add_middleware(
        AuthMiddleware,
        authenticator=services.authenticator,
        # Admin routes ask for keys of their own.
        open_paths=OPEN_PATHS | services.web.page.keys() | ADMIN_PATHS | SLEEP_PATHS,
    )
    app.add_middleware(ContextMiddleware, services=services)
    if services.web.cors.allowed_origins:
        _add_cors(app, services.web.cors)
    app.add_middleware(TrailingSlashMiddleware)
    install_openapi(app)
    return app


def _add_cors(app: FastAPI, cors: CorsSettings) -> None:
    """Around contexts, so that a page sees every error, and a preflight, which has no key, passes.

    Clients send headers of their own making, so any may be sent.
    """
    app.add_middleware(
        CORSMiddleware,
        allow_origins=cors.allowed_origins,
        allow_credentials=cors.allow_credentials,
        allow_methods=("DELETE", "GET", "HEAD", "POST"),
        allow_headers=("*",),
        expose_headers=("request-id", "retry-after", "x-request-id"),
        max_age=cors.max_age_s,
    )


def _add_version_route(app: FastAPI, version: str) -> None:
    @app.get("/version")
    async def show_version() -> Response:
        return json_response({"version": version})


def _add_health_routes(app: FastAPI, services: ApiServices) -> None:
    def check_ready() -> None:
        if not services.is_ready():
            raise ApiError(ApiErrorCode.UNAVAILABLE, "not ready to serve requests")

    # Where the peers have it, and benchmark clients look: no body.
    @app.get("/health")
    @app.get("/ping")
    async def health() -> Response:
        check_ready()
        return Response()

    @app.get("/health/live")
    async def live() -> Response:
        return json_response({"status": "live"})

    @app.get("/health/ready")
    async def ready() -> Response:
        check_ready()
        return json_response({"status": "ready"})


_CODE_OF_STATUS = {
    404: ApiErrorCode.ROUTE_NOT_FOUND,
    405: ApiErrorCode.METHOD_NOT_ALLOWED,
    413: ApiErrorCode.PAYLOAD_TOO_LARGE,
}


def _add_error_handlers(app: FastAPI) -> None:
    async def on_api_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            raise error
        return error_response(error, record_of(request.scope), request.scope["path"])

    async def on_http_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, StarletteHTTPException):
            raise error
        code = _CODE_OF_STATUS.get(error.status_code, ApiErrorCode.INVALID_REQUEST)
        refusal = ApiError(code, str(error.detail))
        response = error_response(refusal, record_of(request.scope), request.scope["path"])
        response.headers.update(error.headers or {})
        return response

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(StarletteHTTPException, on_http_error)
