"""POST /v1/completions: the request, and what it means to the handler."""

from typing import Self

from pydantic import model_validator

from service.api.openai.constraints import ConstrainedParameters
from service.api.openai.parameters import Count, is_list_of
from service.api.openai.prompts import PromptValue, prompts_of
from service.api.openai.sampling import common_fields, sampling_params, text_options
from service.errors import ApiError, ApiErrorCode
from service.handler.requests import GenerationRequest
from service.tokenizer.jobs import EncodeText

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(ConstrainedParameters):
    """prompt: a text, texts, token ids, or lists of token ids.

    logprobs: number of alternatives per token. parse_special_tokens: whether special tokens written
    in a text prompt are read as tokens; the default is yes, since the caller writes the whole
    prompt. max_tokens 0 is allowed with echo, for scoring a prompt. suffix: what stands behind
    the text that is to be written.
    """

    prompt: PromptValue
    echo: bool | None = None
    logprobs: Count | None = None
    parse_special_tokens: bool | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _zero_tokens_only_for_scoring(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(
                ApiErrorCode.INVALID_REQUEST,
                "max_tokens must be at least 1, or 0 together with echo",
                "max_tokens",
            )
        return self

    @model_validator(mode="after")
    def _has_texts_before_a_suffix(self) -> Self:
        if self.suffix and self.echo:
            raise _invalid("suffix excludes echo")
        given = self.prompt
        if self.suffix and not isinstance(given, str) and not is_list_of(given, str):
            raise _invalid("suffix needs a prompt that is text")
        return self

    def to_generation_request(self) -> GenerationRequest:
        """Raises ApiError."""
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        is_scoring_only = self.max_tokens == 0
        return GenerationRequest(
            prompts=prompts_of(self.prompt, self._text),
            sampling=sampling_params(
                self,
                max_tokens=1 if is_scoring_only else self.max_tokens,
                logprobs=self.logprobs,
                prompt_logprobs=prompt_logprobs,
            ),
            text=text_options(self, echo=bool(self.echo)),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            is_scoring_only=is_scoring_only,
            constraint=self.constraint,
            **common_fields(self),
        )

    def _text(self, text: str) -> EncodeText:
        return EncodeText(
            text,
            add_special_tokens=self.add_special_tokens is not False,
            parse_special_tokens=self.parse_special_tokens is not False,
            suffix=self.suffix or "",
        )


def _invalid(message: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, "suffix")
