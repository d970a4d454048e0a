"""Tools as Anthropic's clients write them, and which of them to use."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from service.api.anthropic.blocks import CacheControl
from service.api.openai.parameters import LenientModel, StrictModel
from service.api.openai.tools import ParametersSchema
from service.api.tool_sets import FunctionTool, ToolSet, refuse_other_kinds
from service.limits import MAX_TOOLS


class ToolParam(LenientModel):
    """One of the client's own. strict: the input that the model writes must obey input_schema."""

    harmless = {
        "allowed_callers": (None, ["direct"]),
        "defer_loading": (None, False),
        "eager_input_streaming": (None, True),
        "input_examples": (None, []),
    }
    prefix = "tools."

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: ParametersSchema
    strict: bool | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_would_run_here(cls, data: Any) -> Any:
        return refuse_other_kinds(data, "custom")

    def to_tool(self) -> FunctionTool:
        return FunctionTool(self.name, self.description, self.input_schema, self.strict is True)


class FreeToolChoice(StrictModel):
    """auto: the model decides. any: it uses at least one."""

    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class NamedToolChoice(StrictModel):
    type: Literal["tool"]
    name: str
    disable_parallel_tool_use: bool | None = None


class NoToolChoice(StrictModel):
    type: Literal["none"]


ToolChoice = Annotated[FreeToolChoice | NamedToolChoice | NoToolChoice, Field(discriminator="type")]
ToolParams = Annotated[list[ToolParam], Field(max_length=MAX_TOOLS, fail_fast=True)]


def to_tool_set(tools: list[ToolParam] | None, choice: ToolChoice | None) -> ToolSet:
    specs = tuple(tool.to_tool() for tool in tools or ())
    match choice:
        case None:
            return ToolSet(specs)
        case NoToolChoice():
            return ToolSet(specs, "none")
        case NamedToolChoice():
            return ToolSet(specs, "required", (choice.name,), is_parallel=False)
        case FreeToolChoice():
            kind: Literal["auto", "required"] = "auto" if choice.type == "auto" else "required"
            return ToolSet(specs, kind, is_parallel=not choice.disable_parallel_tool_use)
