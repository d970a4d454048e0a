"""Tools as OpenAI's clients write them: functions, which of them to call, and calls of the past."""

import json
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from service.api.json_shape import measure
from service.api.openai.constraints import schema_bytes
from service.api.openai.parameters import StrictModel
from service.chat.options import ChatOptions, Tool
from service.errors import ApiError, ApiErrorCode
from service.limits import MAX_ITEMS, MAX_TOOLS, Limits

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MAX_DEPTH = 64
_MAX_ARGUMENT_PARTS = 1 << 15
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


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

    def to_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        function["parameters"] = self.argument_schema
        return {"type": "function", "function": function}

    @property
    def argument_schema(self) -> dict[str, Any]:
        parameters = self.function.parameters
        return _NO_PARAMETERS if parameters is None else parameters


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
        function = {"name": self.function.name, "arguments": _arguments(self.function.arguments)}
        return {"id": self.id, "type": "function", "function": function}


Tools = Annotated[list[ToolSpec], Field(max_length=MAX_TOOLS, fail_fast=True)]
ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_ITEMS, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice


def _arguments(text: str) -> dict[str, Any]:
    param = "messages.tool_calls.function.arguments"
    try:
        value = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise _invalid(f"{param} must be the JSON text of an object", param) from error
    if not isinstance(value, dict):
        raise _invalid(f"{param} must be the JSON text of an object", param)
    if text.count("[") + text.count("{") > _MAX_DEPTH and _is_deep(value):
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, f"{param} are nested too deeply", param)
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return False
    return True


class ToolParameters(StrictModel):
    """tool_choice: "auto" (the default with tools), "none": they are kept from the model,
    "required": at least one is called, or the one to call. parallel_tool_calls: false for one call
    at most. include_reasoning: false keeps what the model thought from the answer.
    """

    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None

    @model_validator(mode="after")
    def _refuse_tool_contradictions(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        for name in names:
            if not _NAME.fullmatch(name):
                message = "a function's name has 1 to 64 letters, digits, '_', '-' or '.'"
                raise _invalid(message, "tools.function.name")
        if len(set(names)) < len(names):
            raise _invalid("two functions have the same name", "tools.function.name")
        if not names and self.tool_choice not in (None, "none", "auto"):
            raise _invalid("tool_choice needs tools", "tool_choice")
        chosen = self.tool_choice
        if isinstance(chosen, NamedToolChoice) and chosen.function.name not in names:
            message = f"tool_choice names {chosen.function.name[:64]!r}, which is not among tools"
            raise _invalid(message, "tool_choice")
        return self

    @property
    def shown_tools(self) -> Sequence[ToolSpec]:
        """What the model is told of."""
        return () if self.tool_choice == "none" else self.tools or ()

    def to_chat_options(self, limits: Limits) -> ChatOptions:
        """Raises ApiError."""
        shown, chosen = self.shown_tools, self.tool_choice
        if len(shown) > limits.max_tools:
            message = f"at most {limits.max_tools} tools are allowed"
            raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, "tools")
        is_forced = chosen == "required" or isinstance(chosen, NamedToolChoice)
        callable_tools = tuple(
            Tool(tool.function.name, tool.argument_schema, tool.function.strict is True)
            for tool in shown
            if not isinstance(chosen, NamedToolChoice) or tool.function.name == chosen.function.name
        )
        if is_forced or any(tool.is_strict for tool in callable_tools):
            _check_size(callable_tools, limits)
        return ChatOptions(
            tools=callable_tools,
            choice="required" if is_forced else "auto",
            tools_param="tool_choice" if is_forced else "tools",
            is_parallel=self.parallel_tool_calls is not False
            and not isinstance(chosen, NamedToolChoice),
            shows_reasoning=self.include_reasoning is not False,
        )


def _check_size(tools: Sequence[Tool], limits: Limits) -> None:
    """Raise ApiError where a grammar of these would be too large, before it is made."""
    if sum(schema_bytes(tool.parameters) for tool in tools) > limits.max_grammar_bytes:
        message = f"schemas to be obeyed may have at most {limits.max_grammar_bytes} bytes"
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, "tools")


def check_calls(calls: Sequence[ToolCall]) -> None:
    """Raise ApiError where reading their arguments would take long. calls: of all messages."""
    texts = [call.function.arguments for call in calls]
    # No fewer than there are outside of strings, and quick to count.
    if sum(text.count(c) for text in texts for c in ",:[{") <= _MAX_ARGUMENT_PARTS:
        return
    shapes = [measure(text.encode("utf-8")) for text in texts]
    if sum(shape.num_items + shape.num_nodes for shape in shapes) > _MAX_ARGUMENT_PARTS:
        param = "messages.tool_calls.function.arguments"
        message = f"{param} have too many values"
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, param)


def check_sendable(value: Any, param: str) -> None:
    """Raise ApiError where it holds numbers or text that no other process can be sent."""
    try:
        msgspec.msgpack.encode(value)
    except (OverflowError, RecursionError, ValueError) as error:
        raise _invalid(f"{param}: a number or text in it is out of range", param) from error


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
