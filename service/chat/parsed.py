"""What parsers of chats give. Plain values."""

import msgspec


class ToolCallDelta(msgspec.Struct):
    """The next part of one call. id and name come with its first part, and only there.

    index: of the call among its choice's. arguments: the next piece of a JSON text.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class ParsedText(msgspec.Struct):
    """What some text came to: at most one ToolCallDelta a call."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []

    def add_call(self, index: int, call_id: str, name: str) -> None:
        self.tool_calls.append(ToolCallDelta(index, call_id, name))

    def add_arguments(self, index: int, piece: str) -> None:
        if not self.tool_calls or self.tool_calls[-1].index != index:
            self.tool_calls.append(ToolCallDelta(index))
        self.tool_calls[-1].arguments += piece
