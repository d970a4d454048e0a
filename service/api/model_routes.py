"""The HTTP routes that concern models: generation, tokenisation, what there is.

Each stands twice: at the root, where a request names its model, and under /models/{model_name},
where the path does. Parses, calls the model's handler, renders.
"""

from fastapi import FastAPI, Request
from starlette.responses import Response

from service.api.anthropic.routes import add_message_routes
from service.api.audio_routes import add_audio_routes
from service.api.body import read_body
from service.api.embedding_routes import add_embedding_routes
from service.api.generation_routes import GenerationKind, Place, add_generation_route
from service.api.http_replies import json_response, response_in_pieces
from service.api.middleware import context_of
from service.api.openai.chat import ChatCompletionRequest
from service.api.openai.completions import CompletionRequest
from service.api.openai.renderers import ChatRenderer, CompletionRenderer
from service.api.openai.tokenize import (
    DetokenizeRequest,
    TokenizeRequest,
    detokenize_body,
    tokenize_body,
)
from service.api.openai.wire import ModelList, model_card
from service.api.openapi import describe, describe_body
from service.api.responses.routes import ResponseServices, add_response_routes
from service.api.score_routes import add_score_routes
from service.api.services import ApiServices
from service.api.sglang.renderer import GenerateRenderer
from service.api.sglang.requests import PARAMS, GenerateBody

_NAME = "model_name"
_ID = "model_id"
_COMPLETIONS = GenerationKind(
    "/v1/completions",
    "completions",
    CompletionRequest,
    lambda body, limits: body.to_generation_request(),
    CompletionRenderer,
    lambda body: bool(body.stream),
)
_CHAT = GenerationKind(
    "/v1/chat/completions",
    "chat_completions",
    ChatCompletionRequest,
    ChatCompletionRequest.to_generation_request,
    ChatRenderer,
    lambda body: bool(body.stream),
)
_GENERATE = GenerationKind(
    "/generate",
    "generate",
    GenerateBody,
    lambda body, limits: body.to_generation_request(),
    GenerateRenderer,
    lambda body: bool(body.stream),
    PARAMS,
)


def add_model_routes(app: FastAPI, services: ApiServices) -> None:
    everything = services.models
    limits, peek_s = everything.limits, services.peek_s
    responses = ResponseServices(limits, services.responses, {}, peek_s)
    for place in (
        Place("", (), lambda request: everything),
        # A name may have slashes, and the path behind it says where it ends.
        Place(
            f"/models/{{{_NAME}:path}}",
            (_NAME,),
            lambda request: everything.only(request.path_params[_NAME]),
        ),
    ):
        add_generation_route(app, place, limits, peek_s, _COMPLETIONS)
        add_generation_route(app, place, limits, peek_s, _CHAT)
        add_generation_route(app, place, limits, peek_s, _GENERATE)
        add_message_routes(app, place, limits, peek_s)
        add_response_routes(app, place, responses)
        add_embedding_routes(app, place.prefix, place.parameters, place.models)
        add_score_routes(app, place.prefix, place.parameters, place.models)
        add_audio_routes(app, place.prefix, place.parameters, place.models)
        _add_tokenizer_routes(app, services, place)
        _add_list_routes(app, services, place)


def _add_tokenizer_routes(app: FastAPI, services: ApiServices, place: Place) -> None:
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


def _add_list_routes(app: FastAPI, services: ApiServices, place: Place) -> None:
    @app.get(f"{place.prefix}/v1/models", openapi_extra=describe(place.parameters))
    async def models(request: Request) -> Response:
        found = place.models(request)
        return json_response(ModelList([model_card(m, services.started_s) for m in found.every()]))

    @app.get(
        f"{place.prefix}/v1/models/{{{_ID}:path}}",
        openapi_extra=describe((*place.parameters, _ID)),
    )
    async def model(request: Request) -> Response:
        found = place.models(request).find(request.path_params[_ID])
        return json_response(model_card(found, services.started_s))
