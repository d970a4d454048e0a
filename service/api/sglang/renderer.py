"""Renders one generation as the body or the events of /generate.

As SGLang does it, every event of a stream has the whole text and all tokens so far.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from msgspec import Raw

from service.api.openai.json_parts import JsonParts
from service.api.openai.logprobs import MAX_VALUES, drop_logprobs
from service.api.openai.wire import DONE, encode_json, sse, token_text
from service.api.sglang.requests import GenerateBody
from service.errors import ApiError
from service.handler.collect import ChoiceResult
from service.handler.events import ChoiceDelta, TokenLogprob, Usage
from service.handler.generation import GenerationInfo

_MIN_LOGPROB = -9999.0


class _SoFar:
    """What one choice has come to, as JSON that only grows: an event has all of it, and nothing of
    it is written anew for that."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.num_tokens = 0
        self._last_token_id: int | None = None
        self._finish_reason: str | None = None
        self._stop_reason: str | int | None = None
        self._text = bytearray()
        self._token_ids = bytearray()
        self._logprobs: dict[str, bytearray] = {}

    def add(self, delta: ChoiceDelta, logprobs: dict[str, list[Any]]) -> None:
        """logprobs: lists of the answer and what comes at their ends."""
        self._text += encode_json(delta.text)[1:-1]
        _extend(self._token_ids, delta.token_ids)
        for name, rows in logprobs.items():
            _extend(self._logprobs.setdefault(name, bytearray()), rows)
        self.num_tokens += len(delta.token_ids)
        if delta.token_ids:
            self._last_token_id = delta.token_ids[-1]
        if delta.finish_reason is not None:
            self._finish_reason, self._stop_reason = delta.finish_reason, delta.stop_reason

    @property
    def finish_reason(self) -> dict[str, Any] | None:
        return _finish_reason(
            self._finish_reason, self._stop_reason, self.num_tokens, self._last_token_id
        )

    def body(self, meta: dict[str, Any]) -> dict[str, Any]:
        return {
            "text": Raw(b'"' + self._text + b'"'),
            "output_ids": _array(self._token_ids),
            "meta_info": meta | {name: _array(rows) for name, rows in self._logprobs.items()},
        }


class GenerateRenderer:
    """Implements Renderer."""

    wants_usage_per_chunk = True

    def __init__(self, request: GenerateBody, info: GenerationInfo) -> None:
        self._request = request
        self._info = info
        self._so_far: dict[int, _SoFar] = {}

    def first_chunks(self) -> bytes:
        return b""

    def chunk(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        so_far = self._so_far.setdefault(delta.index, _SoFar(delta.index))
        so_far.add(delta, dict(self._rows("output", delta.logprobs or [])))
        body = so_far.body(self._meta(delta.index, so_far.finish_reason, so_far.num_tokens, usage))
        if not self._request.is_single:
            body["index"] = delta.index
        return sse(encode_json(body))

    def last_chunks(self, usage: Usage) -> bytes:
        return DONE

    def failure(self, error: ApiError) -> bytes:
        return sse(encode_json(error.to_openai()))

    def body(self, results: Sequence[ChoiceResult], usage: Usage) -> Iterator[bytes]:
        parts = JsonParts()
        choices = [self._choice(result, usage, parts) for result in results]
        return parts.pieces(choices[0] if self._request.is_single else choices)

    def _meta(
        self,
        index: int,
        finish_reason: dict[str, Any] | None,
        num_tokens: int,
        usage: Usage | None,
    ) -> dict[str, Any]:
        num_choices = self._request.sampling_params.n or 1
        meta = {
            "id": self._info.request_id,
            "finish_reason": finish_reason,
            "prompt_tokens": len(self._info.prompts[index // num_choices]),
            "completion_tokens": num_tokens,
        }
        if usage is not None and len(self._info.prompts) == 1:
            meta["cached_tokens"] = usage.num_cached_tokens
        return meta

    def _choice(self, result: ChoiceResult, usage: Usage, parts: JsonParts) -> dict[str, Any]:
        """Log probabilities are let go of once they are written."""
        num_tokens, last = len(result.token_ids), next(reversed(result.token_ids), None)
        finish = _finish_reason(result.finish_reason, result.stop_reason, num_tokens, last)
        meta = self._meta(result.index, finish, num_tokens, usage)
        for name, entries in (
            ("input", self._of_prompt(result)),
            ("output", result.logprobs),
        ):
            if entries is not None:
                size = max(1, MAX_VALUES // (1 + len(entries[-1].top))) if entries else 1
                for key, show in self._lists(name):
                    meta[key] = parts.array(entries, partial(_shown, show), size)
                drop_logprobs(entries, parts)
        return {
            "text": parts.text(result.text),
            "output_ids": parts.array(result.token_ids),
            "meta_info": meta,
        }

    def _of_prompt(self, result: ChoiceResult) -> list[TokenLogprob] | None:
        if not self._request.wants_prompt_logprobs or result.prompt_logprobs is None:
            return None
        return result.prompt_logprobs[max(0, self._request.logprob_start_len or 0) :]

    def _rows(self, name: str, entries: list[TokenLogprob]) -> Iterator[tuple[str, list[Any]]]:
        if entries:
            for key, show in self._lists(name):
                yield key, _shown(show, entries)

    def _lists(self, name: str) -> Iterator[tuple[str, Callable[[TokenLogprob], Any]]]:
        """Lists of log probabilities by name, and what they have of a token."""
        shows_text = bool(self._request.return_text_in_logprobs)
        yield f"{name}_token_logprobs", lambda one: _triple(one, shows_text)
        is_named = bool(self._request.token_ids_logprob) and name == "output"
        if self._request.top_logprobs_num or is_named:
            kind = "token_ids" if is_named else "top"
            yield (
                f"{name}_{kind}_logprobs",
                lambda one: [_triple(top, shows_text) for top in one.top],
            )


def _shown(show: Callable[[TokenLogprob], Any], entries: Sequence[TokenLogprob]) -> list[Any]:
    return list(map(show, entries))


def _extend(array: bytearray, values: list[Any]) -> None:
    """Of a JSON array without its brackets."""
    if values:
        array += b"," * bool(array) + encode_json(values)[1:-1]


def _array(values: bytearray) -> Raw:
    return Raw(b"[" + values + b"]")


def _triple(entry: Any, shows_text: bool) -> tuple[float | None, int, str | None]:
    """entry: a TokenLogprob or a TopLogprob."""
    logprob = None if entry.logprob is None else max(entry.logprob, _MIN_LOGPROB)
    return logprob, entry.token_id, token_text(entry.token) if shows_text else None


def _finish_reason(
    reason: str | None, stop_reason: str | int | None, num_tokens: int, last: int | None
) -> dict[str, Any] | None:
    """last: the last token, which has ended it where nothing else has."""
    if reason is None:
        return None
    if reason == "length":
        return {"type": "length", "length": num_tokens}
    return {"type": "stop", "matched": last if stop_reason is None else stop_reason}
