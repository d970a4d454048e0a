"""The requests of POST /v1/messages and its count_tokens, and what they mean to the handler."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from service.api.anthropic.blocks import CacheControl, TextBlocks
from service.api.anthropic.tools import ToolChoice, ToolParams, to_tool_set
from service.api.anthropic.turns import InputMessages, images_in, to_template_messages
from service.api.chat_prompts import effort_kwargs, make_prompt
from service.api.openai.constraints import Schema
from service.api.openai.parameters import (
    INT32_MAX,
    Int32,
    LenientModel,
    Speculative,
    StrictModel,
    max_draft_tokens,
)
from service.api.openai.sampling import unset_sampling
from service.api.tool_sets import ToolSet
from service.errors import ApiError, ApiErrorCode
from service.handler.requests import GenerationRequest, NamedConstraint, TextOptions
from service.limits import Limits
from service.tokenizer.constraints import JsonSchema
from service.tokenizer.jobs import EncodeChat
from workers.sampling.params import SamplingParams

_DEFAULTS = SamplingParams()


class Thinking(StrictModel):
    """enabled and adaptive let the model think as its template has it; disabled turns that off
    where the template can. budget_tokens: so many tokens of thinking, and then its end is said for
    the model. display: omitted keeps the thinking from the answer."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)] | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def is_shown(self) -> bool:
        return self.type != "disabled" and self.display != "omitted"


class JsonOutputFormat(StrictModel):
    type: Literal["json_schema"]
    schema_: Annotated[Schema, Field(alias="schema")]


class OutputConfig(StrictModel):
    """effort: a variable of the model's template, reasoning_effort; max is xhigh there. format: the
    text has to be JSON of that schema."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonOutputFormat | None = None


class Metadata(StrictModel):
    user_id: str | None = None


class CountTokensRequest(LenientModel):
    """What the prompt is made of. model may be left out where only one can be meant.

    A last message of the assistant is continued by the answer.
    """

    harmless = {
        "container": (None,),
        "context_management": (None,),
        "diagnostics": (None,),
        "inference_geo": (None,),
        "mcp_servers": (None, []),
        "speed": (None, "standard"),
    }

    model: str | None = None
    messages: InputMessages
    system: TextBlocks | str | None = None
    tools: ToolParams | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="after")
    def _refuse_contradictions(self) -> Self:
        self.tool_set.check("tools.name")
        last = self.messages[-1].content if self.is_prefilled else ""
        if isinstance(last, list) and {block.type for block in last} != {"text"}:
            message = "a last message of the assistant is continued: it has text, no calls"
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "messages")
        return self

    @property
    def tool_set(self) -> ToolSet:
        return to_tool_set(self.tools, self.tool_choice)

    @property
    def is_prefilled(self) -> bool:
        return bool(self.messages) and self.messages[-1].role == "assistant"

    def to_prompt(self, limits: Limits) -> EncodeChat:
        """Raises ApiError."""
        return make_prompt(
            to_template_messages(self.system, self.messages, limits),
            self.tool_set.shown,
            self._template_kwargs(),
            limits,
            continue_final_message=self.is_prefilled,
            images=images_in(self.messages),
        )

    def _template_kwargs(self) -> dict[str, Any]:
        kwargs: dict[str, Any] = {}
        effort = None if self.output_config is None else self.output_config.effort
        if effort is not None:
            kwargs |= effort_kwargs("xhigh" if effort == "max" else effort)
        if self.thinking is not None:
            kwargs["enable_thinking"] = self.thinking.type != "disabled"
        return kwargs


class MessagesRequest(CountTokensRequest):
    """max_tokens: as many as the context has room for, if that is less. metadata changes nothing.
    priority, cache_salt, speculative: as for completions."""

    harmless = {**CountTokensRequest.harmless, "service_tier": (None, "auto", "standard_only")}

    max_tokens: Annotated[int, Field(ge=1, le=INT32_MAX)]
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int32 | None = None
    metadata: Metadata | None = None
    priority: Int32 | None = None
    cache_salt: str | None = None
    speculative: Speculative = None

    def to_generation_request(self, limits: Limits) -> GenerationRequest:
        """Raises ApiError."""
        shows_reasoning = self.thinking is None or self.thinking.is_shown
        return GenerationRequest(
            prompts=(self.to_prompt(limits),),
            sampling=self._sampling(),
            model=self.model or "",
            text=TextOptions(stop=tuple(self.stop_sequences or ())),
            default_max_tokens=self.max_tokens,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            unset=unset_sampling(self),
            constraint=self._constraint,
            max_draft_tokens=max_draft_tokens(self.speculative),
            chat=self.tool_set.to_chat_options(
                limits,
                shows_reasoning=shows_reasoning,
                thinking_budget=None if self.thinking is None else self.thinking.budget_tokens,
            ),
        )

    def _sampling(self) -> SamplingParams:
        return SamplingParams(
            temperature=_DEFAULTS.temperature if self.temperature is None else self.temperature,
            top_k=_DEFAULTS.top_k if self.top_k is None else self.top_k,
            top_p=_DEFAULTS.top_p if self.top_p is None else self.top_p,
        )

    @property
    def _constraint(self) -> NamedConstraint | None:
        if self.output_config is None or self.output_config.format is None:
            return None
        schema = JsonSchema(self.output_config.format.schema_, is_lenient=False)
        return NamedConstraint(schema, "output_config.format")
