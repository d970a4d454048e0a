"""The OpenAPI document: routes parse their bodies themselves, so their schemas are added here."""

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from msgspec.json import schema_components
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.api.anthropic.requests import CountTokensRequest, MessagesRequest
from service.api.anthropic.wire import Message, TokenCount
from service.api.live_routes import ReplicaLoad, ServerLoad
from service.api.openai.chat import ChatCompletionRequest
from service.api.openai.completions import CompletionRequest
from service.api.openai.embeddings import EmbeddingBody, EmbeddingRequest, VectorList
from service.api.openai.pooling import PooledBody, PoolingRequest
from service.api.openai.scores import RankedList, RerankRequest, ScoreList, ScoreRequest
from service.api.openai.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from service.api.openai.transcriptions import TranscriptionBody
from service.api.openai.wire import (
    ChatChoice,
    CompletionChoice,
    ModelCard,
    ModelList,
    ResponseBody,
)
from service.api.responses.requests import ResponsesRequest
from service.api.responses.wire import DeletedResponse, ItemList, ResponseObject
from service.api.sglang.requests import GenerateBody
from service.api.sglang.wire import GenerateAnswer

_BODIES: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    CountTokensRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    PoolingRequest,
    GenerateBody,
    MessagesRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
    TokenizeRequest,
)
_REF_TEMPLATE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


# What the operation at the end of a path answers; any other answers some object.
_ANSWERS: dict[str, Any] = {
    "/v1/completions": ResponseBody[CompletionChoice],
    "/v1/chat/completions": ResponseBody[ChatChoice],
    "/generate": GenerateAnswer | list[GenerateAnswer],
    "/v1/messages": Message,
    "/v1/messages/count_tokens": TokenCount,
    "/v1/responses": ResponseObject,
    "/v1/responses/{response_id}": ResponseObject,
    "/v1/responses/{response_id}/cancel": ResponseObject,
    "/v1/responses/{response_id}/input_items": ItemList,
    "/v1/audio/transcriptions": TranscriptionBody,
    "/v1/embeddings": VectorList[EmbeddingBody],
    "/pooling": VectorList[PooledBody],
    "/score": ScoreList,
    "/rerank": RankedList,
    "/tokenize": TokenizeResponse,
    "/detokenize": DetokenizeResponse,
    "/load": ServerLoad,
    "/get_load": list[ReplicaLoad],
    "/v1/models": ModelList,
    "/v1/models/{model_id}": ModelCard,
}
_STREAMING = (
    "/generate",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/messages",
    "/v1/responses",
    "/v1/responses/{response_id}",
)
_EMPTY = ("/health", "/ping")

PathParameters = tuple[str, ...]


def describe(parameters: PathParameters, queries: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
    """The openapi_extra of a route that reads these parameters of its path by itself, and those
    behind the question mark."""
    return {
        "parameters": [
            *(
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                for name in parameters
            ),
            *queries,
        ]
    }


def describe_body(model: type[BaseModel], parameters: PathParameters = ()) -> dict[str, Any]:
    """The openapi_extra of a route whose JSON body is `model`."""
    schema = {"$ref": _REF_TEMPLATE.format(model=model.__name__)}
    return {
        **describe(parameters),
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
    }


def describe_form(schema: dict[str, Any], parameters: PathParameters = ()) -> dict[str, Any]:
    """The openapi_extra of a route whose body is a form with a file."""
    content = {"multipart/form-data": {"schema": schema}}
    return {**describe(parameters), "requestBody": {"required": True, "content": content}}


def install_openapi(app: FastAPI) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, definitions = models_json_schema(
                [(model, "validation") for model in _BODIES], ref_template=_REF_TEMPLATE
            )
            components = document.setdefault("components", {}).setdefault("schemas", {})
            answers, answer_definitions = schema_components(
                (*_ANSWERS.values(), DeletedResponse),
                ref_template=_REF_TEMPLATE.format(model="{name}"),
            )
            components.update(definitions["$defs"], **answer_definitions, Error=_ERROR)
            *of_paths, deleted = answers
            _describe_responses(document, dict(zip(_ANSWERS, of_paths, strict=True)), deleted)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _describe_responses(
    document: dict[str, Any], answers: dict[str, Any], deleted: dict[str, Any]
) -> None:
    """One answer and one error for every operation, instead of the framework's own guesses."""
    error = {"$ref": _REF_TEMPLATE.format(model="Error")}
    for path, operations in document["paths"].items():
        place = next((end for end in answers if path.endswith(end)), None)
        content: dict[str, Any] = {
            "application/json": {"schema": {"type": "object"} if place is None else answers[place]}
        }
        if place in _STREAMING:
            content["text/event-stream"] = {}
        answer: dict[str, Any] = {"description": "The answer."}
        if path not in _EMPTY:
            answer["content"] = content
        for method, operation in operations.items():
            if method == "delete":
                answer = {**answer, "content": {"application/json": {"schema": deleted}}}
            operation["responses"] = {
                "200": answer,
                "default": {
                    "description": "One typed error.",
                    "content": {"application/json": {"schema": error}},
                },
            }
