"""What a request for a beam search may ask, and the search that it means."""

from collections.abc import Sequence
from dataclasses import replace

from service.errors import ApiError, ApiErrorCode
from service.handler.beam_streams import SearchPlan
from service.handler.beams import BeamOptions
from service.handler.requests import GenerationRequest
from service.limits import Limits
from workers.engine.protocol import GenerateRequest, ModelInfo
from workers.sampling.params import SamplingParams

_PARAM = "use_beam_search"
_PLAIN = SamplingParams()
# What a search looks at are log probabilities of raw logits: these would have no effect.
_WITHOUT_EFFECT = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "allowed_token_ids",
    "logprob_token_ids",
)


def check_beams(request: GenerationRequest, limits: Limits) -> None:
    """Raise ApiError naming what excludes a beam search, or what is too much for one."""
    if request.beams is None:
        return
    sampling, max_tokens = request.sampling, request.sampling.max_tokens
    others = [name for name in _WITHOUT_EFFECT if getattr(sampling, name) != getattr(_PLAIN, name)]
    for name, is_asked in (
        ("stop", bool(request.text.stop)),
        ("bad_words", bool(request.bad_words)),
        ("repetition_detection", request.repetition is not None),
        ("best_of", request.num_best is not None),
        ("prompt_logprobs", sampling.prompt_logprobs is not None),
        ("max_tokens: 0", request.is_scoring_only),
    ):
        others += [name] if is_asked else []
    if request.constraint is not None:
        others.append(request.constraint.param)
    if others:
        message = f"{_PARAM} excludes {others[0]}"
        raise ApiError(ApiErrorCode.INVALID_REQUEST, message, _PARAM)
    if max_tokens is not None and max_tokens > limits.max_beam_tokens:
        message = f"max_tokens of a beam search may be at most {limits.max_beam_tokens}"
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, "max_tokens")


def with_beam_length(request: GenerationRequest, limits: Limits) -> GenerationRequest:
    """The request with a longest length if it is a beam search, which takes no more than that."""
    default, most = request.default_max_tokens, limits.max_beam_tokens
    if request.beams is None or (default is not None and default <= most):
        return request
    return replace(request, default_max_tokens=most)


def search_plans(
    specs: Sequence[GenerateRequest],
    request: GenerationRequest,
    options: BeamOptions,
    limits: Limits,
    info: ModelInfo,
) -> list[SearchPlan]:
    """specs: one for each prompt. Raises ApiError if a step of all beams would be too large."""
    sampling = request.sampling
    eos_ids = () if sampling.ignore_eos else info.eos_token_ids
    for spec in specs:
        num_tokens = len(spec.prompt_token_ids) + (spec.sampling.max_tokens or 0)
        if num_tokens * request.n > limits.max_beam_step_tokens:
            most = limits.max_beam_step_tokens
            message = f"{_PARAM}: n times the longest text may be {most} tokens"
            raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, _PARAM)
    ending_ids = frozenset((*sampling.stop_token_ids, *eos_ids))
    return [SearchPlan(spec, request.n, options, ending_ids) for spec in specs]
