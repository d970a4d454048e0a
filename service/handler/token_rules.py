"""Which tokens may be said: bad words become sequences of tokens, what is left is checked."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import msgspec

from service.errors import ApiError, ApiErrorCode, from_rejection
from service.handler.requests import GenerationRequest
from service.limits import Limits
from service.request_context import RequestContext
from workers.engine.protocol import ModelInfo
from workers.errors import RequestRejectedError

EncodePlain = Callable[[Sequence[str], RequestContext], Awaitable[list[list[int]]]]
"""Tokens of texts as they stand within others."""


def check_token_rules(request: GenerationRequest, limits: Limits) -> None:
    """Raise ApiError for too many or too long bad words, and for rules beside a grammar."""
    if len(request.bad_words) > limits.max_bad_words:
        message = f"at most {limits.max_bad_words} bad_words are allowed"
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, "bad_words")
    for word in request.bad_words:
        if not word.strip():
            raise ApiError(ApiErrorCode.INVALID_REQUEST, "a bad word is empty", "bad_words")
        if len(word.encode("utf-8", "surrogatepass")) > limits.max_stop_string_bytes:
            message = f"a bad word may have at most {limits.max_stop_string_bytes} bytes"
            raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, "bad_words")
    param = "bad_words" if request.bad_words else "allowed_token_ids"
    if request.constraint is not None and (request.bad_words or request.sampling.allowed_token_ids):
        message = f"{param} and {request.constraint.param} exclude each other"
        raise ApiError(ApiErrorCode.INVALID_REQUEST, message, param)


async def with_token_rules(
    request: GenerationRequest, encode: EncodePlain, context: RequestContext, info: ModelInfo
) -> GenerationRequest:
    """The request with its bad words as tokens. Raises ApiError if they are too long, or if at some
    point no token at all might be said."""
    sampling = request.sampling
    if not (request.bad_words or sampling.allowed_token_ids):
        return request
    if request.bad_words:
        # As a text begins, and as one goes on.
        texts = [lead + word.lstrip() for word in request.bad_words for lead in ("", " ")]
        encoded = await encode(texts, context)
        words = _sequences(encoded[::2], encoded[1::2])
        sampling = msgspec.structs.replace(sampling, bad_words=words)
    ending_ids = (*sampling.stop_token_ids, *(() if sampling.ignore_eos else info.eos_token_ids))
    try:
        sampling.validate(info.vocab_size)
        sampling.check_something_is_left(info.vocab_size, ending_ids)
    except RequestRejectedError as error:
        raise from_rejection(error) from error
    return replace(request, sampling=sampling)


def _sequences(
    bare: Sequence[Sequence[int]], spaced: Sequence[Sequence[int]]
) -> tuple[tuple[int, ...], ...]:
    """As vLLM reads them: a word behind a space is another one where it begins with another token
    and is as long."""
    words: dict[tuple[int, ...], None] = {}
    for one, other in zip(bare, spaced, strict=True):
        words[tuple(one)] = None
        if len(other) == len(one) and other[:1] != one[:1]:
            words[tuple(other)] = None
    return tuple(words)
