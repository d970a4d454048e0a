"""Log probabilities as each of OpenAI's endpoints shows them, in slices where there are many.

Whoever is given many entries empties their list when they are written.
"""

from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET

from service.api.openai.json_parts import JsonParts
from service.api.openai.wire import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprobBody,
    token_text,
)
from service.handler.events import TokenLogprob, TopLogprob

_MIN_LOGPROB = -9999.0
MAX_VALUES = 4096
"""Log probabilities in one piece of a body."""


Show = Callable[[TokenLogprob | TopLogprob], str]


def shown_token(entry: TokenLogprob | TopLogprob) -> str:
    return token_text(entry.token)


def shown_id(entry: TokenLogprob | TopLogprob) -> str:
    """As vLLM writes it: what a client turns back into exactly this token."""
    return f"token_id:{entry.token_id}"


def completion_logprobs(
    entries: list[TokenLogprob] | None, parts: JsonParts, show: Show = shown_token
) -> CompletionLogprobs | None:
    """The alternatives of a position always include the token that stands there."""
    if entries is None:
        return None
    drop_logprobs(entries, parts)
    return CompletionLogprobs(
        tokens=parts.array(entries, lambda some: [show(entry) for entry in some]),
        token_logprobs=parts.array(
            entries,
            lambda some: [
                None if entry.logprob is None else _finite(entry.logprob) for entry in some
            ],
        ),
        top_logprobs=parts.array(
            entries,
            lambda some: [_top_by_text(entry, show) for entry in some],
            _max_entries(entries),
        ),
        text_offset=parts.array(entries, lambda some: [entry.text_offset for entry in some]),
    )


def _top_by_text(entry: TokenLogprob, show: Show) -> dict[str, float] | None:
    if entry.logprob is None:
        return None
    position = {show(other): _finite(other.logprob) for other in entry.top}
    position.setdefault(show(entry), _finite(entry.logprob))
    return position


def chat_logprobs(
    entries: list[TokenLogprob] | None, parts: JsonParts, *, as_ids: bool = False
) -> ChatLogprobs | None:
    """as_ids: tokens are shown by their ids."""
    if entries is None:
        return None
    drop_logprobs(entries, parts)
    return ChatLogprobs(
        parts.array(
            entries,
            lambda some: [_chat_logprob(entry, as_ids=as_ids) for entry in some],
            _max_entries(entries),
        )
    )


def _chat_logprob(entry: TokenLogprob, *, as_ids: bool) -> ChatLogprob:
    token = shown_id(entry).encode() if as_ids else entry.token
    return ChatLogprob(
        token.decode("utf-8", "replace"),
        _finite(entry.logprob or 0.0),
        list(token),
        [_top_logprob(other, as_ids=as_ids) for other in entry.top],
    )


def _top_logprob(entry: TopLogprob, *, as_ids: bool) -> TopLogprobBody:
    token = shown_id(entry).encode() if as_ids else entry.token
    return TopLogprobBody(token.decode("utf-8", "replace"), _finite(entry.logprob), list(token))


def prompt_logprobs_body(entries: list[TokenLogprob] | None, parts: JsonParts) -> Any:
    """A PromptLogprobs, or UNSET."""
    if entries is None:
        return UNSET
    drop_logprobs(entries, parts)
    return parts.array(entries, _prompt_positions, _max_entries(entries))


def _prompt_positions(entries: Sequence[TokenLogprob]) -> PromptLogprobs:
    body: PromptLogprobs = []
    for entry in entries:
        if entry.logprob is None:
            body.append(None)
            continue
        position = {
            str(other.token_id): PromptLogprob(
                _finite(other.logprob), rank, token_text(other.token)
            )
            for rank, other in enumerate(entry.top, start=1)
        }
        position[str(entry.token_id)] = PromptLogprob(
            _finite(entry.logprob), entry.rank, token_text(entry.token)
        )
        body.append(position)
    return body


def drop_logprobs(entries: list[TokenLogprob], parts: JsonParts) -> None:
    """Empty the list once the body has been written."""
    parts.drop(entries, _max_entries(entries))


def _max_entries(entries: Sequence[TokenLogprob]) -> int:
    """How many of them have MAX_VALUES values; all but a prompt's first have as many."""
    return max(1, MAX_VALUES // (1 + len(entries[-1].top))) if entries else 1


def _finite(logprob: float) -> float:
    """JSON has no minus infinity; OpenAI writes -9999."""
    return max(logprob, _MIN_LOGPROB)
