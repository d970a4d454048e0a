"""Why a message ended, in Anthropic's words."""

from typing import NamedTuple


class Stop(NamedTuple):
    """sequence: the one of stop_sequences that was met, if one was."""

    reason: str
    sequence: str | None


def stop_of(
    finish_reason: str | None, stop: str | int | None, num_output_tokens: int, max_tokens: int
) -> Stop:
    """finish_reason, stop: of a choice. max_tokens: as asked for."""
    if finish_reason == "tool_calls":
        return Stop("tool_use", None)
    if finish_reason == "length":
        is_full = num_output_tokens < max_tokens
        return Stop("model_context_window_exceeded" if is_full else "max_tokens", None)
    return Stop("stop_sequence", stop) if isinstance(stop, str) else Stop("end_turn", None)
