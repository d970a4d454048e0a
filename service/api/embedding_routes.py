"""The HTTP route for embeddings. Parses, calls the model's handler, renders."""

from collections.abc import Callable

from fastapi import FastAPI, Request
from starlette.responses import Response

from service.api.body import read_body
from service.api.http_replies import response_in_pieces, until_disconnect
from service.api.middleware import context_of
from service.api.openai.embeddings import EmbeddingRequest, embeddings_body
from service.api.openapi import PathParameters, describe_body
from service.handler.collect import collect
from service.handler.directory import ModelDirectory
from service.handler.embedding import naming
from service.handler.generation import Generation

EMBEDDINGS = "/v1/embeddings"


def add_embedding_routes(
    app: FastAPI,
    prefix: str,
    parameters: PathParameters,
    models_of: Callable[[Request], ModelDirectory],
) -> None:
    @app.post(
        f"{prefix}{EMBEDDINGS}",
        name="embeddings",
        openapi_extra=describe_body(EmbeddingRequest, parameters),
    )
    async def embeddings(request: Request) -> Response:
        context = context_of(request.scope)
        models = models_of(request)
        models.check_admission()
        with models.admitting(context.caller) as lease:
            body = await read_body(request, EmbeddingRequest, models.limits)
            neutral = body.to_generation_request(context.record.request_id)
            handler = models.pick(neutral.model, context.record)
            with naming("input"):
                work = handler.start(neutral, context, lease)
                generation = await until_disconnect(request, work)
        return await _respond(request, body, generation)


async def _respond(request: Request, body: EmbeddingRequest, generation: Generation) -> Response:
    async with generation:
        results = await until_disconnect(request, collect(generation))
        info = generation.info
        pieces = embeddings_body(
            body, info.request_id, info.created_s, info.model, results, generation.usage
        )
        return await until_disconnect(request, response_in_pieces(pieces))
