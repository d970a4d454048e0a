"""Settings of how a model's chats are read."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

ToolFamily = Literal[
    "auto",
    "none",
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
    """auto: by the model's chat template. none: tools are refused; thinking is content."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool_call_parser: ToolFamily = "auto"
    reasoning_parser: ReasoningFamily = "auto"
