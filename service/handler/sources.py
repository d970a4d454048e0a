"""Requests to encoder-decoders: which parameters they have, and what their decoders leave out.

The prompt of a client is what the encoder reads; nothing of it comes before the decoder's output.
"""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from service.errors import ApiError, ApiErrorCode
from service.handler.requests import AudioPrompt, GenerationRequest
from workers.engine.encoder_input import DecoderStart, FeatureEncoder, SourceTokens, TextEncoder
from workers.engine.protocol import GenerateRequest, ModelInfo
from workers.sampling.params import MAX_LOGIT_BIAS_ENTRIES, SamplingParams

_NEVER = -100.0
"""The lowest bias that there is: transformers rules tokens out altogether."""


def check_sources(request: GenerationRequest, info: ModelInfo) -> None:
    """Raise ApiError for prompts that the model does not read and parameters that it lacks."""
    hears = isinstance(info.encoder, FeatureEncoder)
    for prompt in request.prompts:
        if isinstance(prompt, AudioPrompt) != hears:
            message = (
                "this model reads audio: use /v1/audio/transcriptions"
                if hears
                else "this model reads no audio"
            )
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "model" if hears else "file")
    if info.encoder is None:
        return
    _check_bias(request.sampling, info.encoder.start)
    asked = {
        "echo": request.text.echo,
        "prompt_logprobs": request.sampling.prompt_logprobs is not None,
        "max_tokens": request.is_scoring_only,
    }
    for param, is_asked in asked.items():
        if is_asked:
            raise ApiError(
                ApiErrorCode.UNSUPPORTED_PARAMETER,
                "the prompt of an encoder-decoder is no part of its output: "
                f"{param} cannot have this value",
                param,
            )


def _check_bias(sampling: SamplingParams, start: DecoderStart) -> None:
    """An engine takes so many, those that the model excludes among them."""
    excluded = set(start.excluded_ids)
    if len(excluded | sampling.logit_bias.keys()) > MAX_LOGIT_BIAS_ENTRIES:
        raise ApiError(
            ApiErrorCode.LIMIT_EXCEEDED,
            f"this model excludes {len(excluded)} tokens itself: logit_bias may have at most "
            f"{max(0, MAX_LOGIT_BIAS_ENTRIES - len(excluded))} entries",
            "logit_bias",
        )


def num_decoder_tokens(token_ids: Sequence[int], info: ModelInfo) -> int:
    """How much of the context a client's prompt takes. Raises ApiError where the encoder cannot
    take it."""
    encoder = info.encoder
    if not isinstance(encoder, TextEncoder):
        return len(token_ids)
    if len(token_ids) > encoder.max_tokens:
        raise ApiError(
            ApiErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"this model's encoder reads {encoder.max_tokens} tokens; the prompt has "
            f"{len(token_ids)}",
            "prompt",
        )
    return len(encoder.start.token_ids)


def without_excluded(request: GenerationRequest, info: ModelInfo) -> GenerationRequest:
    """The request, with what the model's generation config excludes from its output."""
    if info.encoder is None:
        return request
    return replace(request, sampling=_without_excluded(request.sampling, info.encoder.start))


def request_of_text(
    request_id: str, token_ids: list[int], sampling: SamplingParams, info: ModelInfo
) -> GenerateRequest:
    """What an engine is asked for a text alone: its prompt, or what its encoder reads."""
    encoder = info.encoder
    if not isinstance(encoder, TextEncoder):
        return GenerateRequest(request_id, token_ids, sampling)
    return GenerateRequest(
        request_id,
        list(encoder.start.token_ids),
        _without_excluded(sampling, encoder.start),
        encoder_input=SourceTokens(token_ids),
    )


def _without_excluded(sampling: SamplingParams, start: DecoderStart) -> SamplingParams:
    bias = {**sampling.logit_bias, **dict.fromkeys(start.excluded_ids, _NEVER)}
    min_tokens = sampling.min_tokens if start.may_be_empty else max(1, sampling.min_tokens)
    return msgspec.structs.replace(sampling, logit_bias=bias, min_tokens=min_tokens)
