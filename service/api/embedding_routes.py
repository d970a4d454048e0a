"""The HTTP routes for embeddings. Parse, call the model's handler, render."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import Response

from service.api.body import read_body
from service.api.http_replies import response_in_pieces, started, until_disconnect
from service.api.middleware import context_of
from service.api.openai.embeddings import EmbeddingRequest, embeddings_body
from service.api.openai.pooling import PoolingRequest, pooling_body
from service.api.openapi import PathParameters, describe_body
from service.handler.collect import ChoiceResult, collect
from service.handler.directory import ModelDirectory
from service.handler.embedding import naming
from service.handler.events import Usage
from service.handler.generation import Generation, GenerationInfo

B = TypeVar("B", EmbeddingRequest, PoolingRequest)


@dataclass(frozen=True, slots=True)
class _Kind(Generic[B]):
    """render: pieces of the answer, of the vectors of all inputs in order."""

    path: str
    body_type: type[B]
    render: Callable[[B, GenerationInfo, Sequence[ChoiceResult], Usage], Iterator[bytes]]


_EMBEDDINGS = _Kind("/v1/embeddings", EmbeddingRequest, embeddings_body)
_POOLING = _Kind("/pooling", PoolingRequest, pooling_body)


def add_embedding_routes(
    app: FastAPI,
    prefix: str,
    parameters: PathParameters,
    models_of: Callable[[Request], ModelDirectory],
) -> None:
    _add_route(app, prefix, parameters, models_of, _EMBEDDINGS)
    _add_route(app, prefix, parameters, models_of, _POOLING)


def _add_route(
    app: FastAPI,
    prefix: str,
    parameters: PathParameters,
    models_of: Callable[[Request], ModelDirectory],
    kind: _Kind[B],
) -> None:
    @app.post(
        f"{prefix}{kind.path}",
        name=kind.path.strip("/"),
        openapi_extra=describe_body(kind.body_type, parameters),
    )
    async def embedded(request: Request) -> Response:
        context = context_of(request.scope)
        models = models_of(request)
        models.check_admission()
        with models.admitting(context.caller) as lease:
            body = await read_body(request, kind.body_type, models.limits)
            neutral = body.to_generation_request(context.record.request_id)
            handler = models.pick(neutral.model, context.record)
            with naming("input"):
                work = handler.start(neutral, context, lease)
                generation = await started(request, work)
        return await _respond(request, kind, body, generation)


async def _respond(request: Request, kind: _Kind[B], body: B, generation: Generation) -> Response:
    async with generation:
        results = await until_disconnect(request, collect(generation))
        pieces = kind.render(body, generation.info, results, generation.usage)
        return await until_disconnect(request, response_in_pieces(pieces))
