"""The OpenAPI document: routes parse their bodies themselves, so their schemas are added here."""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from service.api.openai.chat import ChatCompletionRequest
from service.api.openai.completions import CompletionRequest
from service.api.openai.tokenize import DetokenizeRequest, TokenizeRequest

_BODIES: tuple[type[BaseModel], ...] = (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
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


def describe_body(model: type[BaseModel]) -> dict[str, Any]:
    """The openapi_extra of a route whose JSON body is `model`."""
    schema = {"$ref": _REF_TEMPLATE.format(model=model.__name__)}
    error = {"$ref": _REF_TEMPLATE.format(model="Error")}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "default": {
                "description": "One typed error.",
                "content": {"application/json": {"schema": error}},
            }
        },
    }


def install_openapi(app: FastAPI) -> None:
    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, definitions = models_json_schema(
                [(model, "validation") for model in _BODIES], ref_template=_REF_TEMPLATE
            )
            components = document.setdefault("components", {}).setdefault("schemas", {})
            components.update(definitions["$defs"], Error=_ERROR)
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]
