"""The parts of OpenAI's streamed chunks that a benchmark reads. Unknown fields are skipped.

Knows JSON, no sockets.
"""

import msgspec

from service.bench.trace import RequestFailedError, RequestTrace

_DONE = b"[DONE]"


class _PromptDetails(msgspec.Struct):
    cached_tokens: int = 0


class _Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    prompt_tokens_details: _PromptDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class ErrorBody(msgspec.Struct):
    """The `error` object of a failed request."""

    message: str = ""
    code: str | int | None = None
    type: str | None = None

    def to_failure(self, fallback_code: str) -> RequestFailedError:
        return RequestFailedError(str(self.code or self.type or fallback_code), self.message)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: ErrorBody | None = None


class _ErrorResponse(msgspec.Struct):
    error: ErrorBody


_chunk_decoder = msgspec.json.Decoder(_Chunk)
_error_decoder = msgspec.json.Decoder(_ErrorResponse)


def failure_of_response(status: int, body: bytes) -> RequestFailedError:
    """What an HTTP error means, OpenAI-shaped or not."""
    code = f"http_{status}"
    try:
        return _error_decoder.decode(body).error.to_failure(code)
    except msgspec.DecodeError:
        return RequestFailedError(code, body[:200].decode(errors="replace"))


class ChunkReader:
    """Turns one stream's events into its trace.

    Tokens are counted by the `usage` of the chunks: of every chunk where the server sends it with
    each (continuous_usage_stats), of the last one otherwise.
    """

    def __init__(self, trace: RequestTrace) -> None:
        self._trace = trace
        self._has_usage = False
        self._is_finished = False

    def read(self, data: bytes, now_s: float) -> None:
        """Take one event's data. Raises RequestFailedError."""
        if data == _DONE:
            return
        try:
            chunk = _chunk_decoder.decode(data)
        except msgspec.DecodeError as error:
            raise RequestFailedError("bad_stream", f"an event is no chunk: {error}") from error
        if chunk.error is not None:
            raise chunk.error.to_failure("stream_error")
        num_new_tokens = 0 if chunk.usage is None else self._take_usage(chunk.usage)
        has_text = False
        for choice in chunk.choices:
            has_text |= bool(choice.text) or bool(choice.delta and choice.delta.content)
            self._is_finished |= choice.finish_reason is not None
        if chunk.choices and (has_text or num_new_tokens):
            self._trace.add_event(now_s, num_new_tokens)

    def finish(self) -> None:
        """The response is over. Raises RequestFailedError if the stream was not."""
        if not self._is_finished:
            raise RequestFailedError("incomplete_stream", "the stream ended without its end")
        if not self._has_usage:
            raise RequestFailedError("no_usage", "the server does not report usage in streams")

    def _take_usage(self, usage: _Usage) -> int:
        trace = self._trace
        num_new_tokens = usage.completion_tokens - trace.num_output_tokens
        trace.num_input_tokens = usage.prompt_tokens
        trace.num_output_tokens = usage.completion_tokens
        if usage.prompt_tokens_details is not None:
            trace.num_cached_tokens = usage.prompt_tokens_details.cached_tokens
        self._has_usage = True
        return num_new_tokens
