"""OpenAI's names for sampling and text options, turned into the handler's values."""

from collections.abc import Sequence
from typing import TypedDict

import msgspec
from pydantic import BaseModel

from service.api.openai.parameters import (
    GenerationParameters,
    SamplingFields,
    max_draft_tokens,
)
from service.handler.beams import BeamOptions
from service.handler.repetition import RepetitionDetection
from service.handler.requests import TextOptions
from workers.sampling.params import SamplingParams

_DEFAULTS = SamplingParams()


def sampling_params(
    parameters: GenerationParameters,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """Unset parameters take the engine's defaults. Raises ApiError for a bad logit_bias key."""
    return msgspec.structs.replace(
        shared_sampling(parameters),
        seed=parameters.seed,
        max_tokens=max_tokens,
        min_tokens=parameters.min_tokens or 0,
        logprobs=0 if parameters.logprob_token_ids else logprobs,
        prompt_logprobs=prompt_logprobs,
        logprob_token_ids=distinct(parameters.logprob_token_ids),
        allowed_token_ids=distinct(parameters.allowed_token_ids),
    )


def shared_sampling(parameters: SamplingFields) -> SamplingParams:
    """As sampling_params(), of what every protocol calls the same."""

    def or_default(value: float | None, default: float) -> float:
        return default if value is None else float(value)

    return SamplingParams(
        temperature=or_default(parameters.temperature, _DEFAULTS.temperature),
        top_k=_DEFAULTS.top_k if parameters.top_k is None else parameters.top_k,
        top_p=or_default(parameters.top_p, _DEFAULTS.top_p),
        min_p=or_default(parameters.min_p, _DEFAULTS.min_p),
        repetition_penalty=or_default(parameters.repetition_penalty, _DEFAULTS.repetition_penalty),
        presence_penalty=or_default(parameters.presence_penalty, _DEFAULTS.presence_penalty),
        frequency_penalty=or_default(parameters.frequency_penalty, _DEFAULTS.frequency_penalty),
        logit_bias=parameters.token_biases,
        stop_token_ids=tuple(parameters.stop_token_ids or ()),
        ignore_eos=bool(parameters.ignore_eos),
    )


_NAMES = frozenset(("temperature", "top_k", "top_p", "min_p", "repetition_penalty"))


def unset_sampling(parameters: BaseModel) -> frozenset[str]:
    """Fields of sampling that the client has left to the defaults, of which a model may have some
    of its own. parameters: of any protocol that has OpenAI's names for them."""
    return frozenset(name for name in _NAMES if getattr(parameters, name, None) is None)


def distinct(token_ids: Sequence[int] | None) -> tuple[int, ...]:
    """Each once, in their order."""
    return tuple(dict.fromkeys(token_ids or ()))


class CommonFields(TypedDict):
    """Of GenerationRequest, those that both endpoints take from the same parameters."""

    model: str
    n: int
    unset: frozenset[str]
    num_best: int | None
    truncate_prompt_tokens: int | None
    keeps_beginning: bool
    priority: int
    cache_salt: str
    request_id: str
    session_id: str
    repetition: RepetitionDetection | None
    stream_interval: int
    bad_words: tuple[str, ...]
    beams: BeamOptions | None
    max_draft_tokens: int | None


def common_fields(parameters: GenerationParameters) -> CommonFields:
    n = 1 if parameters.n is None else parameters.n
    repetition = parameters.repetition_detection
    return CommonFields(
        model=parameters.model or "",
        n=n if parameters.best_of is None else parameters.best_of,
        unset=unset_sampling(parameters),
        num_best=None if parameters.best_of is None else n,
        truncate_prompt_tokens=parameters.truncate_prompt_tokens,
        keeps_beginning=parameters.truncation_side == "right",
        priority=parameters.priority or 0,
        cache_salt=parameters.cache_salt or "",
        request_id=parameters.request_id or "",
        session_id=parameters.session_id or parameters.prompt_cache_key or "",
        repetition=None if repetition is None else repetition.to_detection(),
        stream_interval=parameters.stream_interval or 1,
        bad_words=tuple(parameters.bad_words or ()),
        beams=parameters.beams,
        max_draft_tokens=max_draft_tokens(parameters.speculative),
    )


def text_options(parameters: GenerationParameters, *, echo: bool) -> TextOptions:
    return TextOptions(
        stop=parameters.stops,
        include_stop=bool(parameters.include_stop_str_in_output),
        skip_special_tokens=parameters.skip_special_tokens is not False,
        echo=echo,
    )
