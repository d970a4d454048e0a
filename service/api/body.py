"""Reads a JSON body into its schema without stalling the event loop that streams to others.

Bodies are parsed by pydantic from their bytes, so numbers, strings and unknown names are judged as
JSON and never coerced. Knows no route.
"""

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from service.api.errors import ApiError, ApiErrorCode
from service.api.json_shape import measure
from service.api.openai.parameters import from_validation_error
from service.limits import Limits

# A body up to here takes under 20 ms whatever it holds, and a common one well under 1 ms.
MAX_INLINE_BYTES = 64 << 10

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, model: type[M], limits: Limits) -> M:
    """The body as `model`. Raises ApiError: media type, size, JSON, unknown names, bad values."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(ApiErrorCode.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
    body = await request.body()
    if len(body) <= MAX_INLINE_BYTES:
        return parse_body(body, model)
    return await asyncio.to_thread(_parse_large_body, body, model, limits)


def parse_body(body: bytes, model: type[M]) -> M:
    """Raises ApiError."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise from_validation_error(error) from error


def _parse_large_body(body: bytes, model: type[M], limits: Limits) -> M:
    """The parser holds the interpreter lock from beginning to end, on whatever thread: what would
    take it long is refused by its shape first."""
    shape = measure(body)
    if shape.num_items > limits.max_body_items:
        raise _over_limit("values in lists", limits.max_body_items)
    if shape.num_nodes > limits.max_body_nodes:
        raise _over_limit("lists, objects and named fields", limits.max_body_nodes)
    return parse_body(body, model)


def _over_limit(what: str, ceiling: int) -> ApiError:
    message = f"the body may have at most {ceiling} {what}"
    return ApiError(ApiErrorCode.LIMIT_EXCEEDED, message)
