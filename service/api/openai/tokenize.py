"""POST /tokenize and /detokenize, shaped as vLLM's: requests and responses."""

from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Self, cast

import msgspec
from pydantic import PlainValidator, ValidationInfo, WithJsonSchema, model_validator

from service.api.openai.chat import Messages, make_chat_prompt
from service.api.openai.json_parts import JsonParts
from service.api.openai.parameters import TOKEN_IDS_SCHEMA, StrictModel, is_list_of, token_ids_or
from service.api.openai.wire import token_text
from service.errors import ApiError, ApiErrorCode
from service.handler.requests import Prompt
from service.limits import Limits
from service.tokenizer.jobs import EncodeText


class TokenizeRequest(StrictModel):
    """Either prompt or messages. return_token_strs: also the text of each token."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    parse_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _has_one_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise ApiError(ApiErrorCode.INVALID_REQUEST, "give either prompt or messages", "prompt")
        chat_only = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
        text_only = ("parse_special_tokens",)
        for name in chat_only if self.messages is None else text_only:
            if getattr(self, name) is not None:
                raise ApiError(
                    ApiErrorCode.INVALID_REQUEST, f"{name} does not apply to this prompt", name
                )
        if self.continue_final_message and self.add_generation_prompt:
            raise ApiError(
                ApiErrorCode.INVALID_REQUEST,
                "continue_final_message excludes add_generation_prompt",
                "continue_final_message",
            )
        return self

    def to_prompt(self, limits: Limits) -> Prompt:
        """Raises ApiError."""
        if self.messages is not None:
            return make_chat_prompt(
                self.messages,
                add_generation_prompt=self.add_generation_prompt,
                continue_final_message=self.continue_final_message,
                add_special_tokens=self.add_special_tokens,
                template_kwargs=self.chat_template_kwargs,
                limits=limits,
            )
        return EncodeText(
            self.prompt or "",
            add_special_tokens=self.add_special_tokens is not False,
            parse_special_tokens=self.parse_special_tokens is not False,
        )


def _check_tokens(value: Any, info: ValidationInfo) -> list[int]:
    found = token_ids_or(value, info.context)
    if found is value and not is_list_of(value, int):
        raise ValueError("must be a list of token ids")
    return cast("list[int]", found)


class DetokenizeRequest(StrictModel):
    """Special tokens are shown, so that the text says what the tokens were."""

    model: str | None = None
    tokens: Annotated[list[int], PlainValidator(_check_tokens), WithJsonSchema(TOKEN_IDS_SCHEMA)]


class TokenizeResponse(msgspec.Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeResponse(msgspec.Struct, frozen=True):
    prompt: str


def tokenize_body(
    token_ids: Sequence[int],
    max_model_len: int,
    token_bytes: Callable[[Sequence[int]], list[bytes]] | None,
) -> Iterator[bytes]:
    """Pieces of a TokenizeResponse. token_bytes: for token_strs; None leaves them out."""
    parts = JsonParts()
    texts = None
    if token_bytes is not None:
        bytes_of = token_bytes
        texts = parts.array(token_ids, lambda some: [token_text(token) for token in bytes_of(some)])
    body = TokenizeResponse(len(token_ids), max_model_len, parts.array(token_ids), texts)
    return parts.pieces(body)


def detokenize_body(text: str) -> Iterator[bytes]:
    """Pieces of a DetokenizeResponse."""
    parts = JsonParts()
    return parts.pieces(DetokenizeResponse(parts.text(text)))
