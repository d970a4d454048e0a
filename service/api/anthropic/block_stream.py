"""BlockStream: deltas of a choice as events of content blocks, one block open at a time."""

from service.api.anthropic.wire import (
    UNSIGNED,
    BlockDelta,
    BlockStart,
    BlockStop,
    Content,
    Delta,
    Event,
    InputJsonDelta,
    SignatureDelta,
    TextContent,
    TextDelta,
    ThinkingContent,
    ThinkingDelta,
    ToolUseContent,
)
from service.chat.parsed import ToolCallDelta
from service.handler.events import ChoiceDelta


class BlockStream:
    """push() deltas in order, close() at the end. A block's index is how many came before it."""

    def __init__(self) -> None:
        self._num_blocks = 0
        self._kind = ""
        self._call = -1

    def push(self, delta: ChoiceDelta) -> list[Event]:
        """What is left of a call that has begun comes before the text behind it."""
        events: list[Event] = []
        if delta.reasoning:
            self._open_for("thinking", ThinkingContent("", ""), events)
            self._add(ThinkingDelta(delta.reasoning), events)
        calls = delta.tool_calls
        if calls and self._is_open(calls[0]):
            self._push_call(calls[0], events)
            calls = calls[1:]
        if delta.text:
            self._open_for("text", TextContent(""), events)
            self._add(TextDelta(delta.text), events)
        for call in calls:
            self._push_call(call, events)
        return events

    def close(self) -> list[Event]:
        events: list[Event] = []
        self._close(events)
        return events

    def _is_open(self, call: ToolCallDelta) -> bool:
        return self._kind == "tool_use" and call.index == self._call

    def _push_call(self, call: ToolCallDelta, events: list[Event]) -> None:
        if not self._is_open(call):
            self._open("tool_use", ToolUseContent(call.id, call.name, {}), events)
            self._call = call.index
        if call.arguments:
            self._add(InputJsonDelta(call.arguments), events)

    def _open_for(self, kind: str, empty: Content, events: list[Event]) -> None:
        if self._kind != kind:
            self._open(kind, empty, events)

    def _open(self, kind: str, empty: Content, events: list[Event]) -> None:
        self._close(events)
        self._kind = kind
        events.append(BlockStart(self._num_blocks, empty))

    def _add(self, delta: Delta, events: list[Event]) -> None:
        events.append(BlockDelta(self._num_blocks, delta))

    def _close(self, events: list[Event]) -> None:
        if not self._kind:
            return
        if self._kind == "thinking":
            self._add(SignatureDelta(UNSIGNED), events)
        events.append(BlockStop(self._num_blocks))
        self._num_blocks += 1
        self._kind = ""
