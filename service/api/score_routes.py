"""The HTTP routes for scores of pairs of texts. Parse, call the model's handler, render."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from fastapi import FastAPI, Request
from starlette.responses import Response

from service.api.body import read_body
from service.api.http_replies import response_in_pieces, started, until_disconnect
from service.api.middleware import context_of
from service.api.openai.scores import RerankRequest, ScoreRequest, rerank_body, score_body
from service.api.openapi import PathParameters, describe_body
from service.handler.collect import collect
from service.handler.directory import ModelDirectory
from service.handler.embedding import naming
from service.handler.events import Usage
from service.handler.generation import GenerationInfo
from service.handler.scoring import scores_of, scoring_request

# As vLLM has them, and as Cohere's and Jina's clients ask. The long ones come first: behind
# /models/ the short ones would take /v2 for a part of a model's name.
SCORE_PATHS = ("/v1/score", "/score")
RERANK_PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")

B = TypeVar("B", ScoreRequest, RerankRequest)


@dataclass(frozen=True, slots=True)
class _Kind(Generic[B]):
    """render: pieces of the answer, of the scores of all pairs in order."""

    body_type: type[B]
    render: Callable[[B, GenerationInfo, Sequence[float], Usage], Iterator[bytes]]


def add_score_routes(
    app: FastAPI,
    prefix: str,
    parameters: PathParameters,
    models_of: Callable[[Request], ModelDirectory],
) -> None:
    for path in SCORE_PATHS:
        _add_route(app, f"{prefix}{path}", parameters, models_of, _Kind(ScoreRequest, score_body))
    for path in RERANK_PATHS:
        _add_route(app, f"{prefix}{path}", parameters, models_of, _Kind(RerankRequest, rerank_body))


def _add_route(
    app: FastAPI,
    path: str,
    parameters: PathParameters,
    models_of: Callable[[Request], ModelDirectory],
    kind: _Kind[B],
) -> None:
    @app.post(path, name=path.strip("/"), openapi_extra=describe_body(kind.body_type, parameters))
    async def scored(request: Request) -> Response:
        context = context_of(request.scope)
        models = models_of(request)
        models.check_admission()
        with models.admitting(context.caller) as lease:
            body = await read_body(request, kind.body_type, models.limits)
            texts = body.texts
            fields = body.common_fields(context.record.request_id)
            handler = models.pick(fields["model"], context.record)
            info, is_activated = handler.model_info, body.use_activation is not False
            neutral = scoring_request(texts, info, is_activated=is_activated, **fields)
            with naming(texts.param):
                work = handler.start(neutral, context, lease)
                generation = await started(request, work)
        async with generation:
            results = await until_disconnect(request, collect(generation))
            scores = await scores_of(texts, info, results)
            pieces = kind.render(body, generation.info, scores, generation.usage)
            return await until_disconnect(request, response_in_pieces(pieces))
