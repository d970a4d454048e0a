"""Every ceiling on a request, checked before anything costs anything.

check_request() runs before tokenising, fit_prompt() after it and before submitting. Both only
look: they allocate nothing and know no protocol.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from service.errors import ApiError, ApiErrorCode, from_rejection
from service.handler.beam_requests import check_beams
from service.handler.constraints import check_constraint
from service.handler.embedding import check_embedding
from service.handler.images import check_image_request
from service.handler.requests import (
    AS_MANY_AS_FIT,
    AudioPrompt,
    EncoderPrompt,
    GenerationRequest,
    ImagePrompt,
    Prompt,
    TokenPrompt,
)
from service.handler.sources import check_sources, num_decoder_tokens
from service.handler.token_rules import check_token_rules
from service.limits import Limits
from service.request_context import RequestContext
from service.tokenizer.jobs import EncodeChat, EncodeText, EncodeTexts, strings_in, utf8_bytes
from workers.engine.protocol import ModelInfo
from workers.errors import RequestRejectedError


@dataclass(frozen=True, slots=True)
class FittedPrompt:
    """A tokenised prompt and the output tokens each of its choices may have."""

    token_ids: Sequence[int]
    max_tokens: int


def check_request(request: GenerationRequest, limits: Limits, info: ModelInfo) -> None:
    """Raise ApiError naming the first parameter that is over its ceiling or out of range."""
    n_param = "n" if request.num_best is None else "best_of"
    _require(1 <= request.n <= limits.max_n, f"{n_param} must be in [1, {limits.max_n}]", n_param)
    is_pooled = request.embedding is not None
    max_prompts = limits.max_inputs if is_pooled else limits.max_prompts
    _require(
        1 <= len(request.prompts) <= max_prompts,
        f"between 1 and {max_prompts} {'inputs' if is_pooled else 'prompts'} are allowed",
        "prompt",
    )
    _check_sampling(request, limits, info)
    _check_stops(request.text.stop, limits)
    check_sources(request, info)
    check_image_request(request, limits, info)
    check_constraint(request, limits, info)
    check_embedding(request, limits, info)
    _check_bytes(request.cache_salt, limits.max_cache_salt_bytes, "cache_salt")
    _check_bytes(request.request_id, limits.max_request_id_bytes, "request_id")
    _check_truncation(request)
    _check_best(request, limits)
    check_token_rules(request, limits)
    check_beams(request, limits)
    if request.repetition is not None and (problem := request.repetition.check()):
        param = "repetition_detection"
        raise ApiError(ApiErrorCode.INVALID_REQUEST, f"{param} {problem}", param)
    _check_pairs(request.prompts, limits)
    for prompt in request.prompts:
        check_prompt(prompt, limits)
    _check_cost(request, limits, [1] * len(request.prompts), request.sampling.max_tokens or 1)


def _check_pairs(prompts: Sequence[Prompt], limits: Limits) -> None:
    """A text that comes once is read in each of its pairs: the body's size bounds nothing."""
    pairs = [prompt.texts for prompt in prompts if isinstance(prompt, EncodeTexts)]
    _require(
        sum(len(text) for texts in pairs for text in texts) <= limits.max_paired_chars,
        f"all pairs together may have at most {limits.max_paired_chars} characters, a text counted "
        "in each of its pairs",
        "prompt",
    )


def _check_truncation(request: GenerationRequest) -> None:
    num_kept = request.truncate_prompt_tokens
    if num_kept is not None and num_kept < 1 and num_kept != AS_MANY_AS_FIT:
        message = f"truncate_prompt_tokens must be at least 1, or {AS_MANY_AS_FIT}"
        raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "truncate_prompt_tokens")


def _check_best(request: GenerationRequest, limits: Limits) -> None:
    num_best = request.num_best
    if num_best is None:
        return
    _require(1 <= num_best <= limits.max_n, f"n must be in [1, {limits.max_n}]", "n")
    if num_best > request.n:
        message = "best_of must be at least n"
        raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "best_of")


def check_rights(request: GenerationRequest, context: RequestContext, limits: Limits) -> None:
    """Raise ApiError if the request asks for what its caller may not have.

    The session is checked here because a header or the body may have said it.
    """
    _check_bytes(context.session, limits.max_session_id_bytes, "session_id")
    allowed = context.caller.priorities
    _require(
        request.priority in allowed,
        f"priority must be in [{allowed.min_priority}, {allowed.max_priority}] for this caller",
        "priority",
    )


def check_prompt(prompt: Prompt, limits: Limits) -> None:
    """Raise ApiError if the prompt is too large to be tokenised."""
    match prompt:
        case EncodeText():
            _check_bytes(prompt.text + prompt.suffix, limits.max_prompt_bytes, "prompt")
            _check_suffix(prompt)
        case EncodeChat():
            _check_chat(prompt, limits)
        case EncodeTexts():
            _check_bytes("".join(prompt.texts), limits.max_prompt_bytes, "prompt")
        case TokenPrompt() | AudioPrompt() | ImagePrompt() | EncoderPrompt():
            check_num_tokens(prompt.token_ids, limits, "prompt")


def _check_suffix(prompt: EncodeText) -> None:
    if prompt.suffix and not prompt.parse_special_tokens:
        message = "suffix needs parse_special_tokens: its marks are special tokens"
        raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "suffix")


def check_num_tokens(token_ids: Sequence[int], limits: Limits, param: str) -> None:
    """Which tokens they are is looked at later, a part at a time: see encoding.check_range."""
    _require(
        len(token_ids) <= limits.max_prompt_tokens,
        f"at most {limits.max_prompt_tokens} tokens are allowed",
        param,
    )


def fit_prompts(
    request: GenerationRequest, prompts: Sequence[Sequence[int]], limits: Limits, info: ModelInfo
) -> list[FittedPrompt]:
    """Cut, measure and give each prompt its output budget. Raises ApiError if one does not fit."""
    fitted = [_fit(request, token_ids, limits, info) for token_ids in prompts]
    longest = max(prompt.max_tokens for prompt in fitted)
    _check_cost(request, limits, [len(prompt.token_ids) for prompt in fitted], longest)
    return fitted


def _fit(
    request: GenerationRequest, token_ids: Sequence[int], limits: Limits, info: ModelInfo
) -> FittedPrompt:
    token_ids = _cut(request, token_ids, info)
    if not token_ids:
        raise ApiError(ApiErrorCode.INVALID_REQUEST, "the prompt has no tokens", "prompt")
    _require(
        len(token_ids) <= limits.max_prompt_tokens,
        f"the prompt has {len(token_ids)} tokens, {limits.max_prompt_tokens} are allowed",
        "prompt",
    )
    room = info.max_request_len - num_decoder_tokens(token_ids, info)
    if request.embedding is not None:
        # The one token that it is counted with is never made.
        room += 1
    wanted = request.sampling.max_tokens
    if room < 1 or (wanted is not None and wanted > room):
        is_asked = wanted is not None and request.embedding is None
        asked = f" and {wanted} output tokens were asked for" if is_asked else ""
        raise ApiError(
            ApiErrorCode.CONTEXT_LENGTH_EXCEEDED,
            f"{_room_of(info)}; the prompt has {len(token_ids)}{asked}",
            "prompt" if room < 1 else "max_tokens",
        )
    if wanted is None:
        default = request.default_max_tokens
        wanted = room if default is None else min(default, room)
    if request.sampling.min_tokens > wanted:
        raise ApiError(
            ApiErrorCode.INVALID_REQUEST, f"min_tokens must be at most {wanted}", "min_tokens"
        )
    return FittedPrompt(token_ids, wanted)


def _cut(request: GenerationRequest, token_ids: Sequence[int], info: ModelInfo) -> Sequence[int]:
    num_kept = request.truncate_prompt_tokens
    if num_kept is None:
        return token_ids
    if num_kept == AS_MANY_AS_FIT:
        num_kept = _prompt_room(request, info)
    keeps_beginning = request.keeps_beginning
    if keeps_beginning is None:
        keeps_beginning = info.is_encoder_only
    return token_ids[:num_kept] if keeps_beginning else token_ids[-num_kept:]


def _prompt_room(request: GenerationRequest, info: ModelInfo) -> int:
    """The most tokens that leave room for the output that is asked for, one at least."""
    if request.embedding is not None:
        return info.max_request_len
    wanted = request.sampling.max_tokens or request.default_max_tokens or 1
    return max(1, info.max_request_len - wanted)


def _room_of(info: ModelInfo) -> str:
    """Begins as OpenAI's own message does: LiteLLM and others tell this error by these words."""
    if info.max_request_len == info.max_context_len:
        return f"this model's maximum context length is {info.max_context_len} tokens"
    return (
        f"this model's maximum context length is {info.max_request_len} tokens here: the KV memory"
        f" of this engine holds no more of its {info.max_context_len}"
    )


def _check_sampling(request: GenerationRequest, limits: Limits, info: ModelInfo) -> None:
    sampling = request.sampling
    for param, count in (
        ("logprobs", sampling.logprobs),
        ("prompt_logprobs", sampling.prompt_logprobs),
    ):
        _require(
            count is None or count <= limits.max_logprobs,
            f"{param} must be at most {limits.max_logprobs}",
            param,
        )
    _require(
        len(sampling.logit_bias) <= limits.max_logit_bias_entries,
        f"logit_bias may have at most {limits.max_logit_bias_entries} entries",
        "logit_bias",
    )
    _require(
        len(sampling.stop_token_ids) <= limits.max_stop_token_ids,
        f"at most {limits.max_stop_token_ids} stop_token_ids are allowed",
        "stop_token_ids",
    )
    try:
        sampling.validate(info.vocab_size)
    except RequestRejectedError as error:
        raise from_rejection(error) from error


def _check_stops(stops: tuple[str, ...], limits: Limits) -> None:
    _require(
        len(stops) <= limits.max_stop_strings,
        f"at most {limits.max_stop_strings} stop strings are allowed",
        "stop",
    )
    for stop in stops:
        if not stop:
            raise ApiError(ApiErrorCode.INVALID_REQUEST, "a stop string is empty", "stop")
        _check_bytes(stop, limits.max_stop_string_bytes, "stop")


def check_num_messages(num_messages: int, limits: Limits) -> None:
    """Raises ApiError."""
    _require(
        1 <= num_messages <= limits.max_messages,
        f"between 1 and {limits.max_messages} messages are allowed",
        "messages",
    )


def _check_chat(prompt: EncodeChat, limits: Limits) -> None:
    check_num_messages(len(prompt.messages), limits)
    values = [value for message in prompt.messages for value in message.values()]
    size = sum(map(utf8_bytes, strings_in([values, prompt.tools])))
    _require(
        size <= limits.max_prompt_bytes,
        f"the messages are longer than {limits.max_prompt_bytes} bytes",
        "messages",
    )
    last = prompt.messages[-1]
    if prompt.continue_final_message and (
        prompt.add_generation_prompt or not isinstance(last.get("content"), str)
    ):
        raise ApiError(
            ApiErrorCode.INVALID_REQUEST,
            "continue_final_message needs a last message with text and no add_generation_prompt",
            "continue_final_message",
        )


def _check_cost(
    request: GenerationRequest, limits: Limits, prompt_lens: list[int], max_tokens: int
) -> None:
    sampling = request.sampling
    # What is allowed goes to the engine with each choice.
    outputs = len(prompt_lens) * request.n * (max_tokens + len(sampling.allowed_token_ids))
    _require(
        sum(prompt_lens) + outputs <= limits.max_request_cost_tokens,
        f"prompts, n and max_tokens together ask for more than {limits.max_request_cost_tokens} "
        "tokens",
        "max_tokens",
    )
    # An output length that nobody asked for is not held against the request here.
    asked = sampling.max_tokens or request.default_max_tokens or 0
    entries = 0
    if sampling.logprobs is not None:
        entries = len(prompt_lens) * request.n * asked * (sampling.logprobs + 1)
    if sampling.prompt_logprobs is not None:
        entries += sum(prompt_lens) * request.n * (sampling.prompt_logprobs + 1)
    _require(
        entries <= limits.max_logprob_entries,
        f"more than {limits.max_logprob_entries} log probabilities are asked for",
        "logprobs",
    )


def _check_bytes(text: str, max_bytes: int, param: str) -> None:
    _require(
        len(text) <= max_bytes and len(text.encode("utf-8")) <= max_bytes,
        f"{param} may have at most {max_bytes} bytes",
        param,
    )


def _require(is_met: bool, message: str, param: str) -> None:
    if not is_met:
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, param)
