"""Renders one generation as the body or the chunks of /v1/completions or /v1/chat/completions."""

from collections.abc import Iterator, Sequence

from msgspec import UNSET, UnsetType

from service.api.openai.chat import ChatCompletionRequest
from service.api.openai.chat_parts import chat_delta, chat_message
from service.api.openai.completions import CompletionRequest
from service.api.openai.json_parts import JsonParts
from service.api.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    drop_logprobs,
    prompt_logprobs_body,
    shown_id,
    shown_token,
)
from service.api.openai.parameters import GenerationParameters
from service.api.openai.wire import (
    DONE,
    ChatChoice,
    ChatChunkChoice,
    ChatDelta,
    CompletionChoice,
    ResponseBody,
    UsageBody,
    encode_json,
    sse,
    usage_body,
)
from service.errors import ApiError
from service.handler.collect import ChoiceResult
from service.handler.events import ChoiceDelta, Usage
from service.handler.generation import GenerationInfo


class _StreamUsage:
    """Which chunks carry usage, as stream_options say."""

    def __init__(self, parameters: GenerationParameters) -> None:
        options = parameters.stream_options
        self.is_included = bool(options and options.include_usage)
        self.is_continuous = bool(options and options.continuous_usage_stats)

    def of_chunk(self, usage: Usage | None) -> UsageBody | None | UnsetType:
        if self.is_continuous and usage is not None:
            return usage_body(usage)
        return None if self.is_included else UNSET


class CompletionRenderer:
    """Implements Renderer for /v1/completions."""

    def __init__(self, request: CompletionRequest, info: GenerationInfo) -> None:
        self._info = info
        self._num_choices_per_prompt = request.n or 1
        self._wants_token_ids = bool(request.return_token_ids)
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        self._show = shown_id if request.return_tokens_as_token_ids else shown_token
        self._stream_usage = _StreamUsage(request)
        self._id = f"cmpl-{info.request_id}"
        self._started: set[int] = set()

    @property
    def wants_usage_per_chunk(self) -> bool:
        return self._stream_usage.is_continuous

    def first_chunks(self) -> bytes:
        return b""

    def chunk(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        parts = JsonParts()
        choice = CompletionChoice(
            index=delta.index,
            text=delta.text,
            logprobs=completion_logprobs(delta.logprobs, parts, self._show),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if self._wants_token_ids:
            choice.token_ids = delta.token_ids
            if delta.index not in self._started:
                self._started.add(delta.index)
                choice.prompt_token_ids = self._prompt_of(delta.index)
        body = self._body([choice], self._stream_usage.of_chunk(usage))
        return sse(b"".join(parts.pieces(body)))

    def last_chunks(self, usage: Usage) -> bytes:
        if not self._stream_usage.is_included:
            return DONE
        return sse(encode_json(self._body([], usage_body(usage)))) + DONE

    def failure(self, error: ApiError) -> bytes:
        return sse(encode_json(error.to_openai()))

    def body(self, results: Sequence[ChoiceResult], usage: Usage) -> Iterator[bytes]:
        parts = JsonParts()
        choices = [self._choice(result, parts) for result in results]
        return parts.pieces(self._body(choices, usage_body(usage)))

    def _choice(self, result: ChoiceResult, parts: JsonParts) -> CompletionChoice:
        choice = CompletionChoice(
            index=result.index,
            text=parts.text(result.text),
            logprobs=completion_logprobs(result.logprobs, parts, self._show),
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
        )
        if self._wants_token_ids:
            choice.token_ids = parts.array(result.token_ids)
            choice.prompt_token_ids = parts.array(self._prompt_of(result.index))
        if self._wants_prompt_logprobs:
            choice.prompt_logprobs = prompt_logprobs_body(result.prompt_logprobs, parts)
        elif result.prompt_logprobs:  # an echo's, which are among its own
            drop_logprobs(result.prompt_logprobs, parts)
        return choice

    def _prompt_of(self, index: int) -> list[int]:
        return self._info.prompts[index // self._num_choices_per_prompt]

    def _body(
        self, choices: list[CompletionChoice], usage: UsageBody | None | UnsetType
    ) -> ResponseBody[CompletionChoice]:
        return ResponseBody(
            id=self._id,
            object="text_completion",
            created=self._info.created_s,
            model=self._info.model,
            choices=choices,
            usage=usage,
        )


class ChatRenderer:
    """Implements Renderer for /v1/chat/completions."""

    def __init__(self, request: ChatCompletionRequest, info: GenerationInfo) -> None:
        self._info = info
        self._num_choices = request.n or 1
        self._wants_token_ids = bool(request.return_token_ids)
        self._wants_prompt_logprobs = request.prompt_logprobs is not None
        self._shows_ids = bool(request.return_tokens_as_token_ids)
        self._stream_usage = _StreamUsage(request)
        self._id = f"chatcmpl-{info.request_id}"

    @property
    def wants_usage_per_chunk(self) -> bool:
        return self._stream_usage.is_continuous

    def first_chunks(self) -> bytes:
        """The role of every choice."""
        chunks = []
        for index in range(self._num_choices):
            choice = ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))
            body = self._chunk_body([choice], self._stream_usage.of_chunk(None))
            if self._wants_token_ids and index == 0:
                body.prompt_token_ids = self._info.prompts[0]
            chunks.append(sse(encode_json(body)))
        return b"".join(chunks)

    def chunk(self, delta: ChoiceDelta, usage: Usage | None) -> bytes:
        parts = JsonParts()
        choice = ChatChunkChoice(
            index=delta.index,
            delta=chat_delta(delta),
            logprobs=chat_logprobs(delta.logprobs, parts, as_ids=self._shows_ids),
            finish_reason=delta.finish_reason,
            stop_reason=delta.stop_reason,
        )
        if self._wants_token_ids:
            choice.token_ids = delta.token_ids
        body = self._chunk_body([choice], self._stream_usage.of_chunk(usage))
        return sse(b"".join(parts.pieces(body)))

    def last_chunks(self, usage: Usage) -> bytes:
        if not self._stream_usage.is_included:
            return DONE
        return sse(encode_json(self._chunk_body([], usage_body(usage)))) + DONE

    def failure(self, error: ApiError) -> bytes:
        return sse(encode_json(error.to_openai()))

    def body(self, results: Sequence[ChoiceResult], usage: Usage) -> Iterator[bytes]:
        parts = JsonParts()
        body = ResponseBody(
            id=self._id,
            object="chat.completion",
            created=self._info.created_s,
            model=self._info.model,
            choices=[self._choice(result, parts) for result in results],
            usage=usage_body(usage),
        )
        if self._wants_token_ids:
            body.prompt_token_ids = parts.array(self._info.prompts[0])
        if self._wants_prompt_logprobs:
            body.prompt_logprobs = prompt_logprobs_body(results[0].prompt_logprobs, parts)
        return parts.pieces(body)

    def _choice(self, result: ChoiceResult, parts: JsonParts) -> ChatChoice:
        return ChatChoice(
            index=result.index,
            message=chat_message(result, parts),
            logprobs=chat_logprobs(result.logprobs, parts, as_ids=self._shows_ids),
            finish_reason=result.finish_reason,
            stop_reason=result.stop_reason,
            token_ids=parts.array(result.token_ids) if self._wants_token_ids else UNSET,
        )

    def _chunk_body(
        self, choices: list[ChatChunkChoice], usage: UsageBody | None | UnsetType
    ) -> ResponseBody[ChatChunkChoice]:
        return ResponseBody(
            id=self._id,
            object="chat.completion.chunk",
            created=self._info.created_s,
            model=self._info.model,
            choices=choices,
            usage=usage,
        )
