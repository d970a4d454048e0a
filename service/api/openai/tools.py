"""Tools as OpenAI's clients write them: functions, which of them to call, and calls of the past."""

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from service.api.chat_prompts import MAX_ARGUMENT_VALUES, check_arguments
from service.api.json_shape import measure
from service.api.openai.parameters import Count, StrictModel
from service.api.tool_sets import FunctionTool, ToolSet
from service.chat.options import ChatOptions
from service.errors import ApiError, ApiErrorCode
from service.limits import MAX_ITEMS, MAX_TOOLS, Limits

# With no more brackets than that no text is too deep.
MIN_DEEP_BRACKETS = 64


def _object_schema(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be a JSON schema of an object")
    if value.get("type", "object") != "object":
        raise ValueError('must be of type "object": a function takes named arguments')
    if not isinstance(value.get("properties", {}), dict):
        raise ValueError("properties must be an object")
    if not isinstance(value.get("x-guidance", {}), dict):
        raise ValueError("x-guidance must be an object")
    return value


ParametersSchema = Annotated[
    dict[str, Any], PlainValidator(_object_schema), WithJsonSchema({"type": "object"})
]


class FunctionSpec(StrictModel):
    """parameters: a JSON schema; left out, there are none. strict: whether the arguments that the
    model writes must obey it (calls that are asked for by tool_choice always do)."""

    name: str
    description: str | None = None
    parameters: ParametersSchema | None = None
    strict: bool | None = None


class ToolSpec(StrictModel):
    type: Literal["function"]
    function: FunctionSpec

    def to_tool(self) -> FunctionTool:
        function = self.function
        is_strict = function.strict is True
        return FunctionTool(function.name, function.description, function.parameters, is_strict)


class FunctionName(StrictModel):
    name: str


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: FunctionName


class FunctionCall(StrictModel):
    """arguments: the JSON text of an object, or "" for none."""

    name: str
    arguments: str


class ToolCall(StrictModel):
    """One that the assistant made. index: of a streamed call that was put together; ignored."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None

    def to_template(self) -> dict[str, Any]:
        """As chat templates read it: arguments are an object. Raises ApiError."""
        function = {"name": self.function.name, "arguments": arguments_of(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


Tools = Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_ITEMS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


_ARGUMENTS = "messages.tool_calls.function.arguments"


def arguments_of(text: str, param: str = _ARGUMENTS) -> dict[str, Any]:
    """The object. param: what the client calls the text. Raises ApiError."""
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise _invalid(f"{param} must be the JSON text of an object", param) from error
    if not isinstance(value, dict):
        raise _invalid(f"{param} must be the JSON text of an object", param)
    if text.count("[") + text.count("{") > MIN_DEEP_BRACKETS:
        check_arguments([value], param)
    return value


class ToolParameters(StrictModel):
    """tool_choice: "auto" (the default with tools), "none": they are kept from the model,
    "required": at least one is called, or the one to call. parallel_tool_calls: false for one call
    at most. include_reasoning: false keeps what the model thought from the answer.
    thinking_token_budget: so many tokens of thinking, and then its end is said for the model.
    """

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: Count | None = None

    @model_validator(mode="after")
    def _refuse_tool_contradictions(self) -> Self:
        self.tool_set.check("tools.function.name")
        return self

    @property
    def tool_set(self) -> ToolSet:
        chosen = self.tool_choice
        is_named = isinstance(chosen, NamedToolChoice)
        return ToolSet(
            tuple(tool.to_tool() for tool in self.tools or ()),
            "required" if isinstance(chosen, NamedToolChoice) else chosen or "auto",
            (chosen.function.name,) if isinstance(chosen, NamedToolChoice) else (),
            is_parallel=self.parallel_tool_calls is not False and not is_named,
        )

    def to_chat_options(self, limits: Limits) -> ChatOptions:
        """Raises ApiError."""
        return self.tool_set.to_chat_options(
            limits,
            shows_reasoning=self.include_reasoning is not False,
            thinking_budget=self.thinking_token_budget,
        )


def check_calls(calls: Sequence[ToolCall]) -> None:
    """Raise ApiError where reading their arguments would take long. calls: of all messages."""
    check_argument_texts([call.function.arguments for call in calls])


def check_argument_texts(texts: Sequence[str], param: str = _ARGUMENTS) -> None:
    """Raise ApiError where reading them would take long. texts: of all calls."""
    # No fewer than there are outside of strings, and quick to count.
    if sum(text.count(c) for text in texts for c in ",:[{") <= MAX_ARGUMENT_VALUES:
        return
    shapes = [measure(text.encode("utf-8")) for text in texts]
    if sum(shape.num_items + shape.num_nodes for shape in shapes) > MAX_ARGUMENT_VALUES:
        message = f"{param} have too many values"
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, param)


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
