"""Renders one generation as the body or the events of /generate.

As SGLang does it, every event of a stream has the whole text and all tokens so far.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from service.api.openai.json_parts import JsonParts
from service.api.openai.logprobs import MAX_VALUES, drop_logprobs
from service.api.openai.wire import DONE, encode_json, sse, token_text
from service.api.sglang.requests import GenerateBody
from service.errors import ApiError
from service.handler.collect import ChoiceResult
from service.handler.events import ChoiceDelta, TokenLogprob, Usage
from service.handler.generation import GenerationInfo

_MIN_LOGPROB = -9999.0


class GenerateRenderer:
    """Implements Renderer."""

    wants_usage_per_chunk = True

    def __init__(self, request: GenerateBody, info: GenerationInfo) -> None:
        self._request = request
        self._info = info
        self._so_far: dict[int, ChoiceResult] = {}

    def first_chunks(self) -> bytes:
        return b""

    def chunk(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        result = self._so_far.setdefault(delta.index, ChoiceResult(delta.index))
        result.add(delta)
        result.texts = [result.text]
        parts = JsonParts()
        body = self._choice(result, usage, parts, is_dropped=False)
        if not self._request.is_single:
            body["index"] = delta.index
        return sse(b"".join(parts.pieces(body)))

    def last_chunks(self, usage: Usage) -> bytes:
        return DONE

    def failure(self, error: ApiError) -> bytes:
        return sse(encode_json(error.to_openai()))

    def body(self, results: Sequence[ChoiceResult], usage: Usage) -> Iterator[bytes]:
        parts = JsonParts()
        choices = [self._choice(result, usage, parts, is_dropped=True) for result in results]
        return parts.pieces(choices[0] if self._request.is_single else choices)

    def _choice(
        self, result: ChoiceResult, usage: Usage | None, parts: JsonParts, *, is_dropped: bool
    ) -> dict[str, Any]:
        """is_dropped: log probabilities are let go of once they are written."""
        num_choices = self._request.sampling_params.n or 1
        prompt = self._info.prompts[result.index // num_choices]
        meta: dict[str, Any] = {
            "id": self._info.request_id,
            "finish_reason": _finish_reason(result),
            "prompt_tokens": len(prompt),
            "completion_tokens": len(result.token_ids),
        }
        if usage is not None and len(self._info.prompts) == 1:
            meta["cached_tokens"] = usage.num_cached_tokens
        for name, entries in (
            ("input", self._of_prompt(result)),
            ("output", result.logprobs),
        ):
            if entries is not None:
                meta |= self._logprobs(name, entries, parts)
                if is_dropped:
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

    def _logprobs(self, name: str, entries: list[TokenLogprob], parts: JsonParts) -> dict[str, Any]:
        shows_text = bool(self._request.return_text_in_logprobs)
        size = max(1, MAX_VALUES // (1 + len(entries[-1].top))) if entries else 1
        body = {
            f"{name}_token_logprobs": parts.array(
                entries, lambda some: [_triple(one, shows_text) for one in some], size
            )
        }
        is_named = bool(self._request.token_ids_logprob) and name == "output"
        if self._request.top_logprobs_num or is_named:
            kind = "token_ids" if is_named else "top"
            body[f"{name}_{kind}_logprobs"] = parts.array(
                entries,
                lambda some: [[_triple(top, shows_text) for top in one.top] for one in some],
                size,
            )
        return body


def _triple(entry: Any, shows_text: bool) -> tuple[float | None, int, str | None]:
    """entry: a TokenLogprob or a TopLogprob."""
    logprob = None if entry.logprob is None else max(entry.logprob, _MIN_LOGPROB)
    return logprob, entry.token_id, token_text(entry.token) if shows_text else None


def _finish_reason(result: ChoiceResult) -> dict[str, Any] | None:
    if result.finish_reason is None:
        return None
    if result.finish_reason == "length":
        return {"type": "length", "length": len(result.token_ids)}
    matched = result.stop_reason
    if matched is None and result.token_ids:
        matched = result.token_ids[-1]
    return {"type": "stop", "matched": matched}
