"""Reads a JSON body into its schema without stalling the event loop that streams to others.

Bodies are parsed by pydantic from their bytes, so numbers, strings and unknown names are judged as
JSON and never coerced. Knows no route.
"""

import asyncio
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from service.api.json_shape import measure
from service.api.lifted_lists import (
    LONG_BYTES,
    SHORT_BYTES,
    BrokenListError,
    LiftedLists,
    lift_lists,
)
from service.api.openai.parameters import from_validation_error
from service.api.unknown_fields import UNKNOWN_REFUSED, UnknownFields
from service.errors import ApiError, ApiErrorCode
from service.limits import MAX_OTHER_ITEMS, Limits

# A body up to here takes under 20 ms whatever it holds, and a common one well under 1 ms.
MAX_INLINE_BYTES = 64 << 10
# What a longer one asks for is made of it in a turn of the loop of its own.
_MAX_QUICK_BYTES = 8 << 10

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, model: type[M], limits: Limits) -> M:
    """The body as `model`.

    Raises ApiError: media type, size, JSON, unknown names, bad values, or its sender has left.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise ApiError(ApiErrorCode.UNSUPPORTED_MEDIA_TYPE, "the body must be application/json")
    unknown: UnknownFields = request.app.state.unknown_fields
    return await parse_json(await _receive(request), model, limits, unknown)


async def parse_json(
    body: bytes, model: type[M], limits: Limits, unknown: UnknownFields = UNKNOWN_REFUSED
) -> M:
    """As read_body() once the body is there."""
    if len(body) <= MAX_INLINE_BYTES:
        parsed = parse_body(body, model, unknown=unknown)
        if len(body) > _MAX_QUICK_BYTES:
            await asyncio.sleep(0)
        return parsed
    return await asyncio.to_thread(_parse_large_body, body, model, limits, unknown)


async def _receive(request: Request) -> bytes:
    try:
        return await request.body()
    except ClientDisconnect as error:
        message = "the client closed the connection before its body was there"
        raise ApiError(ApiErrorCode.CLIENT_CLOSED_REQUEST, message) from error


def parse_body(
    body: bytes,
    model: type[M],
    lifted: LiftedLists | None = None,
    unknown: UnknownFields = UNKNOWN_REFUSED,
) -> M:
    """lifted: lists whose names stand in the body. Raises ApiError."""
    try:
        try:
            return model.model_validate_json(body, context=lifted)
        except ValidationError as error:
            if not unknown.are_all_ignored(error):
                raise
            return model.model_validate_json(body, context=lifted, extra="ignore")
    except ValidationError as error:
        raise from_validation_error(error) from error


def _parse_large_body(
    body: bytes, model: type[M], limits: Limits, unknown: UnknownFields = UNKNOWN_REFUSED
) -> M:
    """The parser holds the interpreter lock from beginning to end, on whatever thread: what would
    take it long is refused by its shape first."""
    if body.count(b"\\") > limits.max_body_escapes:
        raise _over_limit("escaped characters", limits.max_body_escapes)
    shape = measure(body)
    if shape.num_items > limits.max_body_items:
        raise _over_limit("values in lists", limits.max_body_items)
    if shape.num_nodes > limits.max_body_nodes:
        raise _over_limit("lists, objects and named fields", limits.max_body_nodes)
    if shape.num_items <= MAX_OTHER_ITEMS:
        return parse_body(body, model, unknown=unknown)
    rest, lifted = _without_lists(body, shape.num_items)
    parsed = parse_body(rest, model, lifted, unknown)
    if lifted.is_any_left:
        message = "a list of numbers stands where the request has no such list"
        raise ApiError(ApiErrorCode.INVALID_REQUEST, message)
    return parsed


def _without_lists(body: bytes, num_items: int) -> tuple[bytes, LiftedLists]:
    """num_items: of all of its lists. Only bodies of thousands of lists lose short ones too: where
    few values stand in a list that is no prompt, it stays."""
    for min_bytes in (LONG_BYTES, SHORT_BYTES):
        try:
            rest, lifted = lift_lists(body, min_bytes)
        except BrokenListError as error:
            message = "the body is not JSON: a list is broken"
            raise ApiError(ApiErrorCode.INVALID_JSON, message) from error
        if num_items - lifted.num_items <= MAX_OTHER_ITEMS:
            return rest, lifted
    raise _over_limit("values in lists besides long lists of integers", MAX_OTHER_ITEMS)


def _over_limit(what: str, ceiling: int) -> ApiError:
    message = f"a body of more than {MAX_INLINE_BYTES} bytes may have at most {ceiling} {what}"
    return ApiError(ApiErrorCode.LIMIT_EXCEEDED, message)
