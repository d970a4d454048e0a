"""POST /v1/chat/completions: the request, and what it means to the handler.

Content is text and images. Parts of other kinds are refused by name.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from service.api.chat_prompts import (
    ReasoningEffort,
    check_num_parts,
    effort_kwargs,
    make_prompt,
)
from service.api.openai import content as contents
from service.api.openai.constraints import ConstrainedParameters
from service.api.openai.parameters import Count, PositiveInt32, StrictModel
from service.api.openai.sampling import common_fields, sampling_params, text_options
from service.api.openai.tools import ToolCalls, ToolParameters, check_calls
from service.api.tool_sets import FunctionTool
from service.errors import ApiError, ApiErrorCode
from service.handler.requests import GenerationRequest
from service.limits import MAX_ITEMS, Limits
from service.tokenizer.jobs import EncodeChat

_MESSAGE_HARMLESS: dict[str, tuple[Any, ...]] = {
    "audio": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "annotations": (None, []),
}
_UNBUILT_ROLES = ("function",)


class ChatMessage(StrictModel):
    """One turn. developer is another name for system. images: of a user.

    tool_calls: of an assistant. tool_call_id: whose result a message of role tool is. reasoning is
    another name for reasoning_content.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: contents.Content | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: ToolCalls | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_built(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        if data.get("role") in _UNBUILT_ROLES:
            raise _unsupported("messages.role", "functions are tools now: write role tool")
        contents.check_kinds(data.get("content"))
        kept = {}
        for name, value in data.items():
            allowed = _MESSAGE_HARMLESS.get(name)
            if allowed is None:
                kept[name] = value
            elif value not in allowed:
                raise _unsupported(f"messages.{name}", "it is not supported")
        return kept

    @model_validator(mode="after")
    def _only_an_assistant_may_be_silent(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise ApiError(
                ApiErrorCode.INVALID_REQUEST,
                f"a message of role {self.role} needs content",
                "messages.content",
            )
        return self

    @model_validator(mode="after")
    def _calls_and_results_have_their_roles(self) -> Self:
        if self.tool_calls and self.role != "assistant":
            raise _invalid("only an assistant calls tools", "messages.tool_calls")
        if (self.role == "tool") != (self.tool_call_id is not None):
            message = "a message of role tool has a tool_call_id, and no other has"
            raise _invalid(message, "messages.tool_call_id")
        return self

    def to_template(self) -> dict[str, Any]:
        """As chat templates read it. Raises ApiError."""
        shown = contents.to_template(self.content or "")
        if isinstance(shown, list) and self.role != "user":
            raise _invalid("images are for messages of role user", "messages.content")
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": shown,
        }
        if self.name is not None:
            message["name"] = self.name
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        if reasoning is not None:
            message["reasoning_content"] = reasoning
        if self.tool_calls:
            message["tool_calls"] = [call.to_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def _check_calls(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Here and not later, so that those of large bodies are measured where these are parsed."""
    check_calls([call for message in messages for call in message.tool_calls or ()])
    return messages


Messages = Annotated[
    list[ChatMessage], Field(max_length=MAX_ITEMS, fail_fast=True), AfterValidator(_check_calls)
]


class ChatCompletionRequest(ToolParameters, ConstrainedParameters):
    """max_completion_tokens supersedes max_tokens; given both, they must agree.

    add_generation_prompt (default true) and continue_final_message (default false) exclude each
    other. chat_template_kwargs: extra variables of the model's own template. reasoning_effort:
    such a variable, too; "none" also sets enable_thinking to false.
    """

    messages: Messages
    max_completion_tokens: PositiveInt32 | None = None
    logprobs: bool | None = None
    top_logprobs: Count | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None

    @model_validator(mode="after")
    def _refuse_chat_contradictions(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise _invalid("top_logprobs needs logprobs: true", "top_logprobs")
        if self.max_tokens == 0:
            raise _invalid("max_tokens must be at least 1", "max_tokens")
        if None not in (self.max_tokens, self.max_completion_tokens) and (
            self.max_tokens != self.max_completion_tokens
        ):
            raise _invalid("max_tokens and max_completion_tokens differ", "max_tokens")
        if self.continue_final_message and self.add_generation_prompt:
            raise _invalid(
                "continue_final_message excludes add_generation_prompt", "continue_final_message"
            )
        return self

    def to_generation_request(self, limits: Limits) -> GenerationRequest:
        """Raises ApiError."""
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return GenerationRequest(
            prompts=(self.to_prompt(limits),),
            sampling=sampling_params(
                self,
                max_tokens=self.max_completion_tokens or self.max_tokens,
                logprobs=logprobs,
                prompt_logprobs=self.prompt_logprobs,
            ),
            text=text_options(self, echo=False),
            constraint=self.constraint,
            chat=self.to_chat_options(limits),
            **common_fields(self),
        )

    def to_prompt(self, limits: Limits) -> EncodeChat:
        return make_chat_prompt(
            self.messages,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            add_special_tokens=self.add_special_tokens,
            template_kwargs={**self._effort(), **(self.chat_template_kwargs or {})},
            limits=limits,
            tools=self.tool_set.shown,
        )

    def _effort(self) -> dict[str, Any]:
        return {} if self.reasoning_effort is None else effort_kwargs(self.reasoning_effort)


def make_chat_prompt(
    messages: list[ChatMessage],
    *,
    add_generation_prompt: bool | None,
    continue_final_message: bool | None,
    add_special_tokens: bool | None,
    template_kwargs: dict[str, Any] | None,
    limits: Limits,
    tools: Sequence[FunctionTool] = (),
) -> EncodeChat:
    """Raises ApiError if a message has too many parts or the template arguments are too large."""
    for message in messages:
        check_num_parts(message.content, limits)
    return make_prompt(
        [message.to_template() for message in messages],
        tools,
        template_kwargs or {},
        limits,
        add_generation_prompt=add_generation_prompt is not False,
        continue_final_message=bool(continue_final_message),
        add_special_tokens=bool(add_special_tokens),
        images=contents.images_in([message.content for message in messages]),
    )


def _unsupported(param: str, why: str) -> ApiError:
    return ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, f"{param}: {why}", param)


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
