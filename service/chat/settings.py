"""Settings of how a model's chats are read."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from service.chat.tools.custom import CustomToolCalls

ToolFamily = Literal[
    "auto",
    "none",
    "custom",
    "deepseek_v3",
    "glm4",
    "granite",
    "harmony",
    "hermes",
    "kimi_k2",
    "llama3_json",
    "mistral",
    "pythonic",
    "qwen3_coder",
]
ReasoningFamily = Literal["auto", "none", "think", "mistral", "granite", "harmony"]


class ChatSettings(BaseModel):
    """auto: by the model's chat template. none: tools are refused; thinking is content. custom: as
    custom_tool_calls says."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool_call_parser: ToolFamily = "auto"
    reasoning_parser: ReasoningFamily = "auto"
    custom_tool_calls: CustomToolCalls | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tool_call_parser == "custom") != (self.custom_tool_calls is not None):
            raise ValueError("custom_tool_calls and tool_call_parser custom need each other")
        return self
