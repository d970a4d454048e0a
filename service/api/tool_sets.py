"""Functions that a model may call and which of them it shall, whatever protocol says so."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from service.api.openai.schema_sizes import schema_bytes
from service.chat.options import ChatOptions, ChoiceKind, Tool
from service.errors import ApiError, ApiErrorCode
from service.limits import Limits

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class FunctionTool:
    """parameters: a JSON schema of an object; None: there are none. is_strict: the arguments that
    the model writes must obey it."""

    name: str
    description: str | None
    parameters: dict[str, Any] | None
    is_strict: bool

    @property
    def argument_schema(self) -> dict[str, Any]:
        return _NO_PARAMETERS if self.parameters is None else self.parameters

    def to_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.argument_schema
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolSet:
    """kind: "none" keeps the tools from the model. callable_names: with "required", those of which
    one is called, all tools if there are none. is_parallel: whether several may be called.
    """

    tools: tuple[FunctionTool, ...] = ()
    kind: ChoiceKind = "auto"
    callable_names: tuple[str, ...] = ()
    is_parallel: bool = True

    def check(self, name_param: str) -> None:
        """Raise ApiError unless names are good and what is forced is there.

        name_param: what the client calls the name of a tool.
        """
        names = [tool.name for tool in self.tools]
        for name in names:
            if not _NAME.fullmatch(name):
                message = "a function's name has 1 to 64 letters, digits, '_', '-' or '.'"
                raise _invalid(message, name_param)
        if len(set(names)) < len(names):
            raise _invalid("two functions have the same name", name_param)
        if not names and self.kind == "required":
            raise _invalid("tool_choice needs tools", "tool_choice")
        for name in self.callable_names:
            if name not in names:
                message = f"tool_choice names {name[:64]!r}, which is not among tools"
                raise _invalid(message, "tool_choice")

    @property
    def shown(self) -> Sequence[FunctionTool]:
        """What the model is told of."""
        return () if self.kind == "none" else self.tools

    def to_chat_options(
        self, limits: Limits, *, shows_reasoning: bool, thinking_budget: int | None = None
    ) -> ChatOptions:
        """Raises ApiError."""
        if len(self.shown) > limits.max_tools:
            message = f"at most {limits.max_tools} tools are allowed"
            raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, "tools")
        is_forced = self.kind == "required"
        callable_tools = tuple(
            Tool(tool.name, tool.argument_schema, tool.is_strict)
            for tool in self.shown
            if not self.callable_names or tool.name in self.callable_names
        )
        if is_forced or any(tool.is_strict for tool in callable_tools):
            _check_size(callable_tools, limits)
        return ChatOptions(
            tools=callable_tools,
            choice="required" if is_forced else "auto",
            tools_param="tool_choice" if is_forced else "tools",
            is_parallel=self.is_parallel,
            shows_reasoning=shows_reasoning,
            thinking_budget=thinking_budget,
        )


def refuse_other_kinds(data: Any, own: str) -> Any:
    """A tool as it came, if it is one of the client's own and not one that would run here. Raises
    ApiError."""
    kind = data.get("type") if isinstance(data, Mapping) else None
    if isinstance(kind, str) and kind != own:
        message = f"tools: those of type {kind[:64]!r} are not supported"
        raise ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, message, "tools.type")
    return data


def _check_size(tools: Sequence[Tool], limits: Limits) -> None:
    """Raise ApiError where a grammar of these would be too large, before it is made."""
    if sum(schema_bytes(tool.parameters) for tool in tools) > limits.max_grammar_bytes:
        message = f"schemas to be obeyed may have at most {limits.max_grammar_bytes} bytes"
        raise ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, "tools")


def _invalid(message: str, param: str) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
