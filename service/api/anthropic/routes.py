"""The HTTP routes of Anthropic's API. Parses, calls the model's handler, renders."""

from fastapi import FastAPI, Request
from starlette.responses import Response

from service.api.anthropic.renderer import MessageRenderer
from service.api.anthropic.requests import CountTokensRequest, MessagesRequest
from service.api.anthropic.wire import TokenCount
from service.api.body import read_body
from service.api.error_shapes import MESSAGES
from service.api.generation_routes import GenerationKind, Place, add_generation_route
from service.api.http_replies import json_response
from service.api.middleware import context_of
from service.api.openapi import describe_body
from service.limits import Limits

COUNT_TOKENS = f"{MESSAGES}/count_tokens"
_MESSAGES = GenerationKind(
    MESSAGES,
    "messages",
    MessagesRequest,
    MessagesRequest.to_generation_request,
    MessageRenderer,
    lambda body: bool(body.stream),
    {"stop": "stop_sequences", "prompt": "messages"},
)


def add_message_routes(app: FastAPI, place: Place, limits: Limits, peek_s: float) -> None:
    add_generation_route(app, place, limits, peek_s, _MESSAGES)

    @app.post(
        f"{place.prefix}{COUNT_TOKENS}",
        name="count_tokens",
        openapi_extra=describe_body(CountTokensRequest, place.parameters),
    )
    async def count_tokens(request: Request) -> Response:
        context = context_of(request.scope)
        models = place.models(request)
        with models.admitting(context.caller) as lease:
            body = await read_body(request, CountTokensRequest, limits)
            handler = models.pick(body.model or "", context.record)
            token_ids = await handler.tokenise(body.to_prompt(limits), context)
            lease.end(0)
        return json_response(TokenCount(len(token_ids)))
