"""stream_interval: deltas of one choice put together until they have enough tokens."""

from service.chat.parsed import ToolCallDelta
from service.handler.events import ChoiceDelta, TokenLogprob

_MAX_PARTS = 256


class DeltaBuffer:
    """The first delta goes out at once, and the last one whatever it has."""

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens
        self._parts: list[ChoiceDelta] = []
        self._num_held = 0
        self._is_started = False

    def add(self, delta: ChoiceDelta) -> ChoiceDelta | None:
        """What is to be sent now, if anything is."""
        self._parts.append(delta)
        self._num_held += len(delta.token_ids)
        is_first = not self._is_started and self._num_held > 0
        if not is_first and delta.finish_reason is None and self._num_held < self._num_tokens:
            # Joined now and then: not for every token, nor are a thousand parts kept.
            if len(self._parts) >= _MAX_PARTS:
                self._parts = [_joined(self._parts)]
            return None
        held = _joined(self._parts)
        self._parts, self._num_held, self._is_started = [], 0, True
        return held


def _joined(parts: list[ChoiceDelta]) -> ChoiceDelta:
    last = parts[-1]
    if len(parts) == 1:
        return last
    calls: dict[int, list[ToolCallDelta]] = {}
    for call in (call for part in parts for call in part.tool_calls):
        calls.setdefault(call.index, []).append(call)
    return ChoiceDelta(
        index=last.index,
        text="".join([part.text for part in parts]),
        token_ids=[token_id for part in parts for token_id in part.token_ids],
        logprobs=_joined_logprobs(parts),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_output_tokens=last.num_output_tokens,
        reasoning="".join([part.reasoning for part in parts]),
        tool_calls=[_joined_call(index, of_one) for index, of_one in calls.items()],
    )


def _joined_logprobs(parts: list[ChoiceDelta]) -> list[TokenLogprob] | None:
    if all(part.logprobs is None for part in parts):
        return None
    return [entry for part in parts for entry in part.logprobs or ()]


def _joined_call(index: int, parts: list[ToolCallDelta]) -> ToolCallDelta:
    """A delta has one part of a call at most."""
    arguments = "".join([part.arguments for part in parts])
    return ToolCallDelta(index, parts[0].id, parts[0].name, arguments)
