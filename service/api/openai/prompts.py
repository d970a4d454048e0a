"""A text, texts, token ids or lists of token ids: what completions and embeddings are made of."""

from collections.abc import Callable
from typing import Annotated, Any, cast

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from service.api.openai.parameters import TOKEN_IDS_SCHEMA, is_list_of, token_ids_or
from service.handler.requests import Prompt, TokenPrompt
from service.tokenizer.jobs import EncodeText

_Prompts = str | list[str] | list[int] | list[list[int]]


def _check_prompt(value: Any, info: ValidationInfo) -> _Prompts:
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


PromptValue = Annotated[
    _Prompts,
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


def prompts_of(value: _Prompts, of_text: Callable[[str], EncodeText]) -> tuple[Prompt, ...]:
    """value: checked as PromptValue."""
    if isinstance(value, str):
        return (of_text(value),)
    if value and isinstance(value[0], int):
        return (TokenPrompt(value),)
    return tuple(
        of_text(item) if isinstance(item, str) else TokenPrompt(cast("list[int]", item))
        for item in value
    )
