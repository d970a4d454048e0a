"""POST /v1/completions: the request, and what it means to the handler."""

from typing import Annotated, Any, Self, cast

from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema, model_validator

from service.api.openai.constraints import ConstrainedParameters
from service.api.openai.parameters import (
    INT32_MAX,
    TOKEN_IDS_SCHEMA,
    is_list_of,
    token_ids_or,
)
from service.api.openai.sampling import sampling_params, text_options
from service.errors import ApiError, ApiErrorCode
from service.handler.requests import GenerationRequest, Prompt, TokenPrompt
from service.tokenizer.jobs import EncodeText

DEFAULT_MAX_TOKENS = 16


def _check_prompt(
    value: Any, info: ValidationInfo
) -> str | list[str] | list[int] | list[list[int]]:
    """Checks many token ids by their types in bulk, as a schema of unions would not. Those that
    were taken out of the body have been checked."""
    found = token_ids_or(value, info.context)
    if found is not value:
        return cast("list[int]", found)
    if isinstance(value, str) or is_list_of(value, int):
        return cast("str | list[int]", value)
    if isinstance(value, list):
        items = [token_ids_or(item, info.context) for item in value]
        if is_list_of(items, str):
            return cast("list[str]", items)
        pairs = zip(items, value, strict=True)
        if is_list_of(items, list) and all(
            new is not old or is_list_of(new, int) for new, old in pairs
        ):
            return cast("list[list[int]]", items)
    raise ValueError("must be a text, texts, token ids or lists of token ids")


class CompletionRequest(ConstrainedParameters):
    """prompt: a text, texts, token ids, or lists of token ids.

    logprobs: number of alternatives per token. parse_special_tokens: whether special tokens written
    in a text prompt are read as tokens; the default is yes, since the caller writes the whole
    prompt. max_tokens 0 is allowed with echo, for scoring a prompt.
    """

    prompt: Annotated[
        str | list[str] | list[int] | list[list[int]],
        PlainValidator(_check_prompt),
        WithJsonSchema(
            {
                "anyOf": [
                    {"type": "string"},
                    {"type": "array", "items": {"type": "string"}},
                    TOKEN_IDS_SCHEMA,
                    {"type": "array", "items": TOKEN_IDS_SCHEMA},
                ]
            }
        ),
    ]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=INT32_MAX)] | None = None
    parse_special_tokens: bool | None = None

    @model_validator(mode="after")
    def _zero_tokens_only_for_scoring(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise ApiError(
                ApiErrorCode.INVALID_REQUEST,
                "max_tokens must be at least 1, or 0 together with echo",
                "max_tokens",
            )
        return self

    def to_generation_request(self) -> GenerationRequest:
        """Raises ApiError."""
        prompt_logprobs = self.prompt_logprobs
        if self.echo and self.logprobs is not None:
            prompt_logprobs = max(self.logprobs, prompt_logprobs or 0)
        is_scoring_only = self.max_tokens == 0
        return GenerationRequest(
            prompts=tuple(self._prompts()),
            sampling=sampling_params(
                self,
                max_tokens=1 if is_scoring_only else self.max_tokens,
                logprobs=self.logprobs,
                prompt_logprobs=prompt_logprobs,
            ),
            model=self.model or "",
            n=1 if self.n is None else self.n,
            text=text_options(self, echo=bool(self.echo)),
            default_max_tokens=DEFAULT_MAX_TOKENS,
            is_scoring_only=is_scoring_only,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            request_id=self.request_id or "",
            session_id=self.session_id or self.prompt_cache_key or "",
            constraint=self.constraint,
        )

    def _prompts(self) -> list[Prompt]:
        prompt = self.prompt
        if isinstance(prompt, str):
            return [self._text(prompt)]
        if prompt and isinstance(prompt[0], int):
            return [TokenPrompt(prompt)]
        return [
            self._text(item) if isinstance(item, str) else TokenPrompt(cast("list[int]", item))
            for item in prompt
        ]

    def _text(self, text: str) -> EncodeText:
        return EncodeText(
            text,
            add_special_tokens=self.add_special_tokens is not False,
            parse_special_tokens=self.parse_special_tokens is not False,
        )
