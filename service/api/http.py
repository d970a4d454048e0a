"""The HTTP API: OpenAI's routes, tokenisation, health. Parses, calls the handler, renders.

Built from injected collaborators; knows no Ray and no replica. Bodies are parsed by pydantic from
their bytes, so numbers, strings and unknown names are judged as JSON and never coerced.
"""

import logging
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import HTTPException
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.responses import Response

from service.api.errors import ApiError, ApiErrorCode
from service.api.middleware import (
    OPEN_PATHS,
    REQUEST_ID_KEY,
    AuthMiddleware,
    BodyLimitMiddleware,
    RequestIdMiddleware,
)
from service.api.openai.chat import ChatCompletionRequest
from service.api.openai.completions import CompletionRequest
from service.api.openai.parameters import from_validation_error
from service.api.openai.responses import ChatRenderer, CompletionRenderer, Renderer
from service.api.openai.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from service.api.openai.wire import ModelCard, ModelList, token_text
from service.api.openapi import describe_body, install_openapi
from service.api.responses import (
    EventStream,
    EventStreamResponse,
    error_response,
    json_response,
    until_disconnect,
)
from service.api.services import ApiServices
from service.handler.collect import collect
from service.handler.generation import Generation
from service.request_log.http import ObservingMiddleware

M = TypeVar("M", bound=BaseModel)
_log = logging.getLogger(__name__)


def build_http_app(services: ApiServices) -> FastAPI:
    """The ASGI application. Serve it with a server that limits header sizes."""
    app = FastAPI(title="Tessera", version=services.version, docs_url=None, redoc_url=None)
    app.router.redirect_slashes = False
    _add_generation_routes(app, services)
    _add_tokenizer_routes(app, services)
    _add_model_routes(app, services)
    _add_health_routes(app, services)
    _add_error_handlers(app)
    # The last one added is the outermost: ids come first, then keys, then bodies.
    handler = services.handler
    app.add_middleware(
        BodyLimitMiddleware,
        max_body_bytes=handler.limits.max_body_bytes,
        on_refused=handler.count_refusal,
    )
    app.add_middleware(
        AuthMiddleware, authenticator=services.authenticator, on_refused=handler.count_refusal
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


async def read_body(request: Request, model: type[M]) -> M:
    """The body as `model`. Raises ApiError: media type, JSON, unknown names, bad values."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(ApiErrorCode.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
    body = await request.body()
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation_error(error) from error


def _add_generation_routes(app: FastAPI, services: ApiServices) -> None:
    handler = services.handler

    @app.post("/v1/completions", openapi_extra=describe_body(CompletionRequest))
    async def completions(request: Request) -> Response:
        with handler.counting_refusals():
            body = await read_body(request, CompletionRequest)
            neutral = _with_id(body, request).to_generation_request()
        generation = await handler.start(neutral)
        renderer = CompletionRenderer(body, generation.info)
        return await _respond(request, generation, renderer, bool(body.stream), services.peek_s)

    @app.post("/v1/chat/completions", openapi_extra=describe_body(ChatCompletionRequest))
    async def chat_completions(request: Request) -> Response:
        with handler.counting_refusals():
            body = await read_body(request, ChatCompletionRequest)
            neutral = _with_id(body, request).to_generation_request(handler.limits)
        generation = await handler.start(neutral)
        renderer = ChatRenderer(body, generation.info)
        return await _respond(request, generation, renderer, bool(body.stream), services.peek_s)


G = TypeVar("G", CompletionRequest, ChatCompletionRequest)


def _with_id(body: G, request: Request) -> G:
    """A body without an id of its own is known by the id of its HTTP request."""
    if body.request_id:
        return body
    return body.model_copy(update={"request_id": request.scope[REQUEST_ID_KEY]})


async def _respond(
    request: Request, generation: Generation, renderer: Renderer, is_stream: bool, peek_s: float
) -> Response:
    if is_stream:
        stream = EventStream(generation)
        try:
            await stream.peek(peek_s)
        except BaseException:
            await stream.aclose()
            raise
        return EventStreamResponse(stream, renderer)
    async with generation:
        results = await until_disconnect(request, collect(generation))
        return Response(renderer.body(results, generation.usage), media_type="application/json")


def _add_tokenizer_routes(app: FastAPI, services: ApiServices) -> None:
    handler = services.handler

    @app.post("/tokenize", openapi_extra=describe_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        with handler.counting_refusals():
            body = await read_body(request, TokenizeRequest)
        handler.check_model(body.model or "")
        token_ids = await handler.tokenise(body.to_prompt(handler.limits))
        texts = [token_text(token) for token in handler.token_bytes(token_ids)]
        return json_response(
            TokenizeResponse(
                len(token_ids),
                handler.model_info.max_context_len,
                token_ids,
                texts if body.return_token_strs else None,
            )
        )

    @app.post("/detokenize", openapi_extra=describe_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        with handler.counting_refusals():
            body = await read_body(request, DetokenizeRequest)
        handler.check_model(body.model or "")
        return json_response(DetokenizeResponse(await handler.detokenise(body.tokens)))


def _add_model_routes(app: FastAPI, services: ApiServices) -> None:
    handler = services.handler

    def card() -> ModelCard:
        info = handler.model_info
        return ModelCard(info.name, services.started_s, info.max_context_len, info.vocab_size)

    @app.get("/v1/models")
    async def models() -> Response:
        return json_response(ModelList([card()]))

    @app.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> Response:
        handler.check_model(model_id)
        return json_response(card())

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": services.version})


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


def _add_error_handlers(app: FastAPI) -> None:
    async def on_api_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, ApiError):
            raise error
        return error_response(error)

    async def on_http_error(request: Request, error: Exception) -> Response:
        if not isinstance(error, StarletteHTTPException):
            raise error
        code = _CODE_OF_STATUS.get(error.status_code, ApiErrorCode.INVALID_REQUEST)
        response = error_response(ApiError(code, str(error.detail)))
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
