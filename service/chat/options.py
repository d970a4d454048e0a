"""What a client asks of a chat besides its messages, free of its protocol. Frozen values."""

from dataclasses import dataclass
from typing import Any, Literal

ChoiceKind = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call. parameters: a JSON schema of an object.

    is_strict: what the model writes for it must obey that schema.
    """

    name: str
    parameters: dict[str, Any]
    is_strict: bool = False


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """tools: those that may be called; with "required" one of them is. tools_param: what the client
    calls what forces a call. is_parallel: whether there may be several calls. shows_reasoning:
    whether the client is given what the model thought. thinking_budget: tokens of thinking, after
    which its end is said for the model; None: as many as it likes.
    """

    tools: tuple[Tool, ...] = ()
    choice: ChoiceKind = "none"
    tools_param: str = "tools"
    is_parallel: bool = True
    shows_reasoning: bool = True
    thinking_budget: int | None = None

    @property
    def names(self) -> dict[str, Tool]:
        return {tool.name: tool for tool in self.tools}
