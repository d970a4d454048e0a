"""A route that generates, whatever its protocol: admission, body, handler, answer or stream."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.responses import Response

from service.api.body import read_body
from service.api.http_replies import (
    EventStream,
    EventStreamResponse,
    ended_by_failures,
    response_in_pieces,
    started,
    until_disconnect,
)
from service.api.middleware import context_of
from service.api.openapi import PathParameters, describe_body
from service.api.renderer import Renderer
from service.errors import params_named
from service.handler.best import best_of
from service.handler.collect import collect
from service.handler.directory import ModelDirectory
from service.handler.generation import Generation, GenerationInfo
from service.handler.requests import GenerationRequest
from service.limits import Limits

B = TypeVar("B", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Place:
    """Where routes stand. models: those that a request to them can reach; may raise ApiError."""

    prefix: str
    parameters: PathParameters
    models: Callable[[Request], ModelDirectory]


@dataclass(frozen=True, slots=True)
class GenerationKind(Generic[B]):
    """name: of its route. neutral: the body as every protocol says it; may raise ApiError. params:
    what the protocol calls otherwise than OpenAI's completions; see params_named()."""

    path: str
    name: str
    body_type: type[B]
    neutral: Callable[[B, Limits], GenerationRequest]
    renderer: Callable[[B, GenerationInfo], Renderer]
    is_stream: Callable[[B], bool]
    params: Mapping[str, str] = field(default_factory=dict)


def add_generation_route(
    app: FastAPI, place: Place, limits: Limits, peek_s: float, kind: GenerationKind[B]
) -> None:
    """peek_s: see ApiServices."""

    @app.post(
        f"{place.prefix}{kind.path}",
        name=kind.name,
        openapi_extra=describe_body(kind.body_type, place.parameters),
    )
    async def generate(request: Request) -> Response:
        generation, body = await _begun(request, place.models(request), limits, kind)
        async with ended_by_failures(generation):
            renderer = kind.renderer(body, generation.info)
            if kind.is_stream(body):
                return await streamed(generation, renderer, peek_s)
            return await whole(request, generation, renderer)


async def _begun(
    request: Request, models: ModelDirectory, limits: Limits, kind: GenerationKind[B]
) -> tuple[Generation, B]:
    """What the body asks for, and the body. Raises ApiError."""
    context = context_of(request.scope)
    models.check_admission()
    with models.admitting(context.caller) as lease:
        body = await read_body(request, kind.body_type, limits)
        with params_named(kind.params):
            neutral = with_id(kind.neutral(body, limits), context.record.request_id)
            handler = models.pick(neutral.model, context.record)
            return await started(request, handler.start(neutral, context, lease)), body


def with_id(neutral: GenerationRequest, request_id: str) -> GenerationRequest:
    """What has no id of its own is known by the id of its HTTP request."""
    return neutral if neutral.request_id else dataclasses.replace(neutral, request_id=request_id)


async def streamed(generation: Generation, renderer: Renderer, peek_s: float) -> Response:
    """Raises ApiError where the generation fails at once."""
    stream = EventStream(generation)
    try:
        await stream.peek(peek_s)
    except BaseException:
        await stream.aclose()
        raise
    return EventStreamResponse(stream.events(renderer), stream.aclose)


async def whole(request: Request, generation: Generation, renderer: Renderer) -> Response:
    """Raises ApiError where the generation fails."""
    async with generation:
        made = await until_disconnect(request, collect(generation))
        results = best_of(made, generation.request)
        pieces = renderer.body(results, generation.usage)
        return await until_disconnect(request, response_in_pieces(pieces))
