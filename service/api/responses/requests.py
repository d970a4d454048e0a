"""The request of POST /v1/responses, and what it means to the handler."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from service.api.chat_prompts import effort_kwargs, make_prompt
from service.api.openai.constraints import ConstrainedParameters, JsonSchemaFormat
from service.api.openai.parameters import Count, PositiveInt32, StrictModel, without_harmless
from service.api.openai.sampling import common_fields, sampling_params, text_options
from service.api.openai.tools import check_argument_texts
from service.api.responses.items import FunctionCallItem, Item, Items, MessageItem
from service.api.responses.tools import ToolChoice, Tools, check_choice, to_tool_set
from service.api.responses.turns import images_in, to_template_messages
from service.api.tool_sets import ToolSet
from service.errors import ApiError, ApiErrorCode
from service.handler.requests import GenerationRequest, NamedConstraint
from service.limits import Limits
from service.tokenizer.constraints import JSON_OBJECT, Constraint, JsonSchema
from service.tokenizer.jobs import EncodeChat

LOGPROBS = "message.output_text.logprobs"
# Names of chats' parameters that Responses call otherwise, or have not.
_NOT_HERE: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (None, False),
    "best_of": (None, 1),
    "max_tokens": (None,),
    "n": (None, 1),
    "prompt_logprobs": (None,),
    "response_format": (None,),
    "return_token_ids": (None, False),
    "return_tokens_as_token_ids": (None, False),
}
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "access_programs": (None,),
    "background_options": (None,),
    "context_management": (None, []),
    "conversation": (None,),
    "image": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "prompt_cache_options": (None,),
    "prompt_cache_retention": (None, "in_memory", "in-memory", "24h"),
    "truncation": (None, "disabled"),
    **_NOT_HERE,
}
_SHORT_CHARS = 512
_MAX_METADATA = 16
_KEY_CHARS = 64
ShortText = Annotated[str, Field(max_length=_SHORT_CHARS)]
Includable = Literal[
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class Reasoning(StrictModel):
    """effort: a variable of the model's template, reasoning_effort; max is xhigh there. summary:
    there are none, since all of the thinking is in the answer; concise cannot be had. max_tokens:
    of thinking, after which its end is said for the model."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    max_tokens: PositiveInt32 | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_what_asks_for_nothing(cls, data: Any) -> Any:
        table: dict[str, tuple[Any, ...]] = {
            "context": (None, "auto", "all_turns"),
            "mode": (None, "standard"),
        }
        return without_harmless(data, table, "reasoning.")

    @model_validator(mode="after")
    def _has_no_short_summary(self) -> Self:
        if "concise" in (self.summary, self.generate_summary):
            raise _unsupported("reasoning.summary")
        return self


class PlainFormat(StrictModel):
    type: Literal["text", "json_object"]


class SchemaFormat(JsonSchemaFormat):
    type: Literal["json_schema"]


class TextConfig(StrictModel):
    """format: as response_format of chats. verbosity: a variable of the model's template."""

    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    def constraint(self) -> Constraint | None:
        if isinstance(self.format, SchemaFormat):
            return JsonSchema(self.format.schema_, is_lenient=self.format.strict is False)
        is_object = self.format is not None and self.format.type == "json_object"
        return JSON_OBJECT if is_object else None


def _check_arguments(value: str | list[Item]) -> str | list[Item]:
    """Here and not later, so that those of large bodies are measured where these are parsed."""
    items = value if isinstance(value, list) else ()
    texts = [item.arguments for item in items if isinstance(item, FunctionCallItem)]
    check_argument_texts(texts, "input.arguments")
    return value


class StoredItems(StrictModel):
    """Items that a store had, which have passed here before."""

    items: Annotated[Items, AfterValidator(_check_arguments)]


class ResponsesRequest(ConstrainedParameters):
    """input: a text is short for one message of a user. instructions: a system message before all,
    not kept for responses that follow. previous_response_id: what comes before the input. store
    (default true): keep the response, as far as there is room. background: the response is in the
    store, and goes on without its client, which is answered at once or, with stream, as it grows.
    include: "message.output_text.logprobs" for log probabilities; the others are of tools that
    there are not, or ask for what is there anyway. max_tool_calls: of tools that run at the server,
    so of none. What completions and chats have besides is as there.
    """

    input: Annotated[str | Items, AfterValidator(_check_arguments)]
    instructions: str | None = None
    max_output_tokens: PositiveInt32 | None = None
    tools: Tools | None = None
    tool_choice: Annotated[ToolChoice | None, BeforeValidator(check_choice)] = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: Annotated[list[Includable], Field(max_length=32, fail_fast=True)] | None = None
    top_logprobs: Count | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: ShortText | None = None
    max_tool_calls: PositiveInt32 | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    user: ShortText | None = None
    safety_identifier: ShortText | None = None
    prompt_cache_key: ShortText | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_here(cls, data: Any) -> Any:
        return without_harmless(data, _HARMLESS, "")

    @model_validator(mode="after")
    def _refuse_response_contradictions(self) -> Self:
        self.tool_set.check("tools.name")
        if self.top_logprobs and LOGPROBS not in (self.include or ()):
            raise _invalid(f'top_logprobs needs include: ["{LOGPROBS}"]', "top_logprobs")
        if self.text is not None and self.text.constraint() and super().constraint is not None:
            raise _invalid("text.format and other constraints exclude each other", "text.format")
        self._check_background()
        self._check_metadata()
        return self

    @property
    def tool_set(self) -> ToolSet:
        is_parallel = self.parallel_tool_calls is not False
        return to_tool_set(self.tools, self.tool_choice, is_parallel=is_parallel)

    @property
    def constraint(self) -> NamedConstraint | None:
        made = None if self.text is None else self.text.constraint()
        return super().constraint if made is None else NamedConstraint(made, "text.format")

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @property
    def items(self) -> list[Item]:
        """Of the input."""
        if isinstance(self.input, str):
            return [MessageItem(role="user", content=self.input)]
        return self.input

    def to_generation_request(self, items: Sequence[Item], limits: Limits) -> GenerationRequest:
        """items: the input after what it follows, without references. Raises ApiError."""
        logprobs = (self.top_logprobs or 0) if self.shows_logprobs else None
        return GenerationRequest(
            prompts=(self._to_prompt(items, limits),),
            sampling=sampling_params(
                self, max_tokens=self.max_output_tokens, logprobs=logprobs, prompt_logprobs=None
            ),
            text=text_options(self, echo=False),
            **common_fields(self),
            constraint=self.constraint,
            chat=self.tool_set.to_chat_options(
                limits,
                shows_reasoning=True,
                thinking_budget=None if self.reasoning is None else self.reasoning.max_tokens,
            ),
        )

    def _to_prompt(self, items: Sequence[Item], limits: Limits) -> EncodeChat:
        return make_prompt(
            to_template_messages(self.instructions, items, limits),
            self.tool_set.shown,
            {**self._template_kwargs(), **(self.chat_template_kwargs or {})},
            limits,
            images=images_in(items),
        )

    def _template_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        effort = None if self.reasoning is None else self.reasoning.effort
        if effort is not None:
            kwargs |= effort_kwargs("xhigh" if effort == "max" else effort)
        if self.text is not None and self.text.verbosity is not None:
            kwargs["verbosity"] = self.text.verbosity
        return kwargs

    def _check_background(self) -> None:
        if self.background and not self.is_stored:
            raise _invalid("background needs store: true, to be found later", "background")

    def _check_metadata(self) -> None:
        pairs = self.metadata or {}
        is_long = any(len(k) > _KEY_CHARS or len(v) > _SHORT_CHARS for k, v in pairs.items())
        if is_long or len(pairs) > _MAX_METADATA:
            message = (
                f"metadata may have {_MAX_METADATA} pairs, of keys of {_KEY_CHARS} characters and "
                f"values of {_SHORT_CHARS}"
            )
            raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, "metadata")


def _unsupported(param: str) -> ApiError:
    message = f"{param} with this value is not supported"
    return ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, message, param)


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
