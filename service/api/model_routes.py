"""The HTTP routes that concern models: generation, tokenisation, what there is.

Each stands twice: at the root, where a request names its model, and under /models/{model_name},
where the path does. Parses, calls the model's handler, renders.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import Response

from service.api.audio_routes import add_audio_routes
from service.api.body import read_body
from service.api.embedding_routes import add_embedding_routes
from service.api.http_replies import (
    EventStream,
    EventStreamResponse,
    json_response,
    response_in_pieces,
    until_disconnect,
)
from service.api.middleware import context_of
from service.api.openai.chat import ChatCompletionRequest
from service.api.openai.completions import CompletionRequest
from service.api.openai.renderers import ChatRenderer, CompletionRenderer, Renderer
from service.api.openai.tokenize import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize_body,
    tokenize_body,
)
from service.api.openai.wire import ModelList, model_card
from service.api.openapi import PathParameters, describe, describe_body
from service.api.services import ApiServices
from service.handler.collect import collect
from service.handler.directory import ModelDirectory
from service.handler.generation import Generation, GenerationInfo
from service.handler.requests import GenerationRequest
from service.limits import Limits

_NAME = "model_name"
G = TypeVar("G", CompletionRequest, ChatCompletionRequest)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where routes stand. models: those that a request to them can reach; may raise ApiError."""

    prefix: str
    parameters: PathParameters
    models: Callable[[Request], ModelDirectory]


def add_model_routes(app: FastAPI, services: ApiServices) -> None:
    everything = services.models
    for place in (
        _Place("", (), lambda request: everything),
        # A name may have slashes, and the path behind it says where it ends.
        _Place(
            f"/models/{{{_NAME}:path}}",
            (_NAME,),
            lambda request: everything.only(request.path_params[_NAME]),
        ),
    ):
        _add_generation_route(app, services, place, _COMPLETIONS)
        _add_generation_route(app, services, place, _CHAT)
        add_embedding_routes(app, place.prefix, place.parameters, place.models)
        add_audio_routes(app, place.prefix, place.parameters, place.models)
        _add_tokenizer_routes(app, services, place)
        _add_list_routes(app, services, place)


@dataclass(frozen=True, slots=True)
class _Kind(Generic[G]):
    """Of generation. name: of its route. neutral: the body as every front end says it."""

    path: str
    name: str
    body_type: type[G]
    neutral: Callable[[G, Limits], GenerationRequest]
    renderer: Callable[[G, GenerationInfo], Renderer]


_COMPLETIONS = _Kind(
    "/v1/completions",
    "completions",
    CompletionRequest,
    lambda body, limits: body.to_generation_request(),
    CompletionRenderer,
)
_CHAT = _Kind(
    "/v1/chat/completions",
    "chat_completions",
    ChatCompletionRequest,
    ChatCompletionRequest.to_generation_request,
    ChatRenderer,
)


def _add_generation_route(
    app: FastAPI, services: ApiServices, place: _Place, kind: _Kind[G]
) -> None:
    limits = services.models.limits

    @app.post(
        f"{place.prefix}{kind.path}",
        name=kind.name,
        openapi_extra=describe_body(kind.body_type, place.parameters),
    )
    async def generate(request: Request) -> Response:
        context = context_of(request.scope)
        models = place.models(request)
        models.check_admission()
        with models.admitting(context.caller) as lease:
            body = await read_body(request, kind.body_type, limits)
            neutral = kind.neutral(_with_id(body, context.record.request_id), limits)
            handler = models.pick(neutral.model, context.record)
            generation = await until_disconnect(request, handler.start(neutral, context, lease))
        renderer = kind.renderer(body, generation.info)
        return await _respond(request, generation, renderer, bool(body.stream), services.peek_s)


def _with_id(body: G, request_id: str) -> G:
    """A body without an id of its own is known by the id of its HTTP request."""
    if body.request_id:
        return body
    return body.model_copy(update={"request_id": request_id})


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
        pieces = renderer.body(results, generation.usage)
        return await until_disconnect(request, response_in_pieces(pieces))


def _add_tokenizer_routes(app: FastAPI, services: ApiServices, place: _Place) -> None:
    limits = services.models.limits

    @app.post(
        f"{place.prefix}/tokenize", openapi_extra=describe_body(TokenizeRequest, place.parameters)
    )
    async def tokenize(request: Request) -> Response:
        context = context_of(request.scope)
        models = place.models(request)
        with models.admitting(context.caller) as lease:
            body = await read_body(request, TokenizeRequest, limits)
            handler = models.pick(body.model or "", context.record)
            token_ids = await handler.tokenise(body.to_prompt(limits), context)
            lease.end(0)
        max_model_len = handler.model_info.max_request_len
        token_bytes = handler.token_bytes if body.return_token_strs else None
        return await response_in_pieces(tokenize_body(token_ids, max_model_len, token_bytes))

    @app.post(
        f"{place.prefix}/detokenize",
        openapi_extra=describe_body(DetokenizeRequest, place.parameters),
    )
    async def detokenize(request: Request) -> Response:
        context = context_of(request.scope)
        models = place.models(request)
        with models.admitting(context.caller) as lease:
            body = await read_body(request, DetokenizeRequest, limits)
            handler = models.pick(body.model or "", context.record)
            text = await handler.detokenise(body.tokens, context)
            lease.end(0)
        return await response_in_pieces(detokenize_body(text))


def _add_list_routes(app: FastAPI, services: ApiServices, place: _Place) -> None:
    @app.get(f"{place.prefix}/v1/models", openapi_extra=describe(place.parameters))
    async def models(request: Request) -> Response:
        found = place.models(request)
        return json_response(ModelList([model_card(m, services.started_s) for m in found]))

    @app.get(
        f"{place.prefix}/v1/models/{{model_id:path}}", openapi_extra=describe(place.parameters)
    )
    async def model(request: Request, model_id: str) -> Response:
        found = place.models(request).find(model_id)
        return json_response(model_card(found, services.started_s))
