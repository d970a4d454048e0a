"""stream_interval: deltas of one choice put together until they have enough tokens."""

from service.chat.parsed import ToolCallDelta
from service.handler.events import ChoiceDelta


class DeltaBuffer:
    """The first delta goes out at once, and the last one whatever it has."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._held: ChoiceDelta | None = None
        self._is_started = False

    def add(self, delta: ChoiceDelta) -> ChoiceDelta | None:
        """What is to be sent now, if anything is."""
        held = self._held = delta if self._held is None else _joined(self._held, delta)
        is_first = not self._is_started and bool(held.token_ids)
        if not is_first and held.finish_reason is None and len(held.token_ids) < self._num_tokens:
            return None
        self._held, self._is_started = None, True
        return held


def _joined(first: ChoiceDelta, second: ChoiceDelta) -> ChoiceDelta:
    logprobs = first.logprobs
    if second.logprobs is not None:
        logprobs = (logprobs or []) + second.logprobs
    return ChoiceDelta(
        index=second.index,
        text=first.text + second.text,
        token_ids=first.token_ids + second.token_ids,
        logprobs=logprobs,
        finish_reason=second.finish_reason,
        stop_reason=second.stop_reason,
        num_output_tokens=second.num_output_tokens,
        reasoning=first.reasoning + second.reasoning,
        tool_calls=_joined_calls(first.tool_calls, second.tool_calls),
    )


def _joined_calls(first: list[ToolCallDelta], second: list[ToolCallDelta]) -> list[ToolCallDelta]:
    """A delta has one part of a call at most."""
    joined = {call.index: call for call in first}
    for call in second:
        before = joined.get(call.index)
        joined[call.index] = (
            call
            if before is None
            else ToolCallDelta(
                call.index, before.id, before.name, before.arguments + call.arguments
            )
        )
    return list(joined.values())
