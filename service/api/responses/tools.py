"""Tools as clients of Responses write them, flat, and which of them to use."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from service.api.openai.parameters import LenientModel, StrictModel
from service.api.openai.tools import ParametersSchema
from service.api.tool_sets import FunctionTool, ToolSet, refuse_other_kinds
from service.errors import ApiError, ApiErrorCode
from service.limits import MAX_TOOLS


class FunctionToolParam(LenientModel):
    """One of the client's own. strict: the arguments that the model writes must obey parameters,
    which they need not where it is left out."""

    harmless = {
        "allowed_callers": (None, ["direct"]),
        "defer_loading": (None, False),
        "output_schema": (None,),
    }
    prefix = "tools."

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: ParametersSchema | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_run_here(cls, data: Any) -> Any:
        return refuse_other_kinds(data, "function")

    def to_tool(self) -> FunctionTool:
        return FunctionTool(self.name, self.description, self.parameters, self.strict is True)

    def to_wire(self) -> dict[str, Any]:
        """As the response repeats it."""
        return {
            "type": "function",
            "name": self.name,
            "description": self.description,
            "parameters": self.parameters,
            "strict": self.strict is True,
        }


class NamedFunction(StrictModel):
    type: Literal["function"]
    name: str


class AllowedTools(StrictModel):
    """mode: auto or required, of these tools alone."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Field(min_length=1, max_length=MAX_TOOLS)]


ToolChoice = Literal["none", "auto", "required"] | NamedFunction | AllowedTools
Tools = Annotated[list[FunctionToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)]


def to_tool_set(
    tools: list[FunctionToolParam] | None, choice: ToolChoice | None, *, is_parallel: bool
) -> ToolSet:
    specs = tuple(tool.to_tool() for tool in tools or ())
    match choice:
        case NamedFunction():
            return ToolSet(specs, "required", (choice.name,), is_parallel=False)
        case AllowedTools():
            names = tuple(tool.name for tool in choice.tools)
            return ToolSet(specs, choice.mode, names, is_parallel=is_parallel)
        case _:
            return ToolSet(specs, choice or "auto", is_parallel=is_parallel)


def check_choice(data: Any) -> Any:
    """Refuse a choice of a kind that there is, but not here."""
    kind = data.get("type") if isinstance(data, Mapping) else None
    if isinstance(kind, str) and kind not in ("function", "allowed_tools"):
        message = f"tool_choice: type {kind[:64]!r} is not supported"
        raise ApiError(ApiErrorCode.UNSUPPORTED_PARAMETER, message, "tool_choice")
    return data
