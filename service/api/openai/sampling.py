"""OpenAI's names for sampling and text options, turned into the handler's values."""

from service.api.openai.parameters import GenerationParameters
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
        seed=parameters.seed,
        max_tokens=max_tokens,
        min_tokens=parameters.min_tokens or 0,
        stop_token_ids=tuple(parameters.stop_token_ids or ()),
        ignore_eos=bool(parameters.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def text_options(parameters: GenerationParameters, *, echo: bool) -> TextOptions:
    return TextOptions(
        stop=parameters.stops,
        include_stop=bool(parameters.include_stop_str_in_output),
        skip_special_tokens=parameters.skip_special_tokens is not False,
        echo=echo,
    )
