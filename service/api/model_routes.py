"""The HTTP routes that concern models: generation, tokenisation, what there is.

Each stands twice: at the root, where a request names its model, and under /models/{model_name},
where the path does. Parses, calls the model's handler, renders.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import Response

from service.api.body import read_body
from service.api.middleware import REQUEST_ID_KEY
from service.api.openai.chat import ChatCompletionRequest
from service.api.openai.completions import CompletionRequest
from service.api.openai.responses import ChatRenderer, CompletionRenderer, Renderer
from service.api.openai.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from service.api.openai.wire import ModelList, model_card, token_text
from service.api.openapi import PathParameters, describe, describe_body
from service.api.responses import EventStream, EventStreamResponse, json_response, until_disconnect
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
    limits, counting_refusals = services.models.limits, services.models.counting_refusals

    @app.post(
        f"{place.prefix}{kind.path}",
        name=kind.name,
        openapi_extra=describe_body(kind.body_type, place.parameters),
    )
    async def generate(request: Request) -> Response:
        with counting_refusals():
            models = place.models(request)
            body = await read_body(request, kind.body_type, limits)
            neutral = kind.neutral(_with_id(body, request), limits)
            handler = models.pick(neutral.model).handler
        generation = await until_disconnect(request, handler.start(neutral))
        renderer = kind.renderer(body, generation.info)
        return await _respond(request, generation, renderer, bool(body.stream), services.peek_s)


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


def _add_tokenizer_routes(app: FastAPI, services: ApiServices, place: _Place) -> None:
    limits, counting_refusals = services.models.limits, services.models.counting_refusals

    @app.post(
        f"{place.prefix}/tokenize", openapi_extra=describe_body(TokenizeRequest, place.parameters)
    )
    async def tokenize(request: Request) -> Response:
        with counting_refusals():
            models = place.models(request)
            body = await read_body(request, TokenizeRequest, limits)
            handler = models.pick(body.model or "").handler
            token_ids = await handler.tokenise(body.to_prompt(limits))
        texts = [token_text(token) for token in handler.token_bytes(token_ids)]
        return json_response(
            TokenizeResponse(
                len(token_ids),
                handler.model_info.max_context_len,
                token_ids,
                texts if body.return_token_strs else None,
            )
        )

    @app.post(
        f"{place.prefix}/detokenize",
        openapi_extra=describe_body(DetokenizeRequest, place.parameters),
    )
    async def detokenize(request: Request) -> Response:
        with counting_refusals():
            models = place.models(request)
            body = await read_body(request, DetokenizeRequest, limits)
            handler = models.pick(body.model or "").handler
            return json_response(DetokenizeResponse(await handler.detokenise(body.tokens)))


def _add_list_routes(app: FastAPI, services: ApiServices, place: _Place) -> None:
    counting_refusals = services.models.counting_refusals

    @app.get(f"{place.prefix}/v1/models", openapi_extra=describe(place.parameters))
    async def models(request: Request) -> Response:
        with counting_refusals():
            found = place.models(request)
        return json_response(ModelList([model_card(m, services.started_s) for m in found]))

    @app.get(
        f"{place.prefix}/v1/models/{{model_id:path}}", openapi_extra=describe(place.parameters)
    )
    async def model(request: Request, model_id: str) -> Response:
        with counting_refusals():
            found = place.models(request).find(model_id)
        return json_response(model_card(found, services.started_s))
