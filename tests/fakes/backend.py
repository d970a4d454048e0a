"""A GenerationBackend in memory: every submitted request plays the outputs of a script."""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np

from service.errors import ApiError, ApiErrorCode
from service.request_context import RequestContext
from tests.fakes.logprobs import pack
from workers.engine.logprobs import TokenLogprobs
from workers.engine.protocol import (
    FinishReason,
    GenerateRequest,
    ModelInfo,
    OutputError,
    StepOutput,
)
from workers.errors import ErrorCode
from workers.pooling.params import EmbeddingInfo, Pooling, PoolingParams
from workers.pooling.vectors import pack_vector

Script = Callable[[GenerateRequest], Sequence[StepOutput]]

MODEL_INFO = ModelInfo(
    name="tiny",
    vocab_size=420,
    max_context_len=512,
    eos_token_ids=(2,),
    attention_backend="torch_native",
    page_size=1,
    num_pages=1024,
    tp_size=1,
    dtype="float32",
    max_request_len=512,
    has_grammars=True,
    embedding=EmbeddingInfo(4, Pooling.LAST),
)


def make_outputs(
    request: GenerateRequest,
    token_ids: Sequence[int],
    *,
    finish: FinishReason = FinishReason.STOP,
    num_cached_tokens: int = 0,
) -> list[StepOutput]:
    """One output a token, cut at max_tokens, with made-up log probabilities where asked for; of a
    request for an embedding, a made-up vector."""
    if request.pooling is not None:
        return [_vector_output(request, request.pooling, num_cached_tokens)]
    limit = request.sampling.max_tokens or len(token_ids)
    outputs = [StepOutput(request.request_id, [token_id]) for token_id in token_ids[:limit]]
    num_top = request.sampling.logprobs
    if num_top is not None:
        for output in outputs:
            output.logprobs = [_logprobs(output.token_ids[0], num_top)]
    first, last = outputs[0], outputs[-1]
    first.num_cached_tokens = num_cached_tokens
    first.queue_s, first.prefill_s = 0.001, 0.002
    if request.sampling.prompt_logprobs is not None:
        rest = request.prompt_token_ids[1:]
        first.prompt_logprobs = pack(
            [_logprobs(token_id, request.sampling.prompt_logprobs) for token_id in rest]
        )
    last.finish_reason = FinishReason.LENGTH if len(token_ids) > limit else finish
    if last.finish_reason is FinishReason.STOP:
        last.stop_token_id = last.token_ids[-1]
    return outputs


def _vector_output(
    request: GenerateRequest, pooling: PoolingParams, num_cached_tokens: int
) -> StepOutput:
    """Values that tell prompts apart, raw."""
    values = [len(request.prompt_token_ids), sum(request.prompt_token_ids), 0.5, -0.25]
    vector = np.array(values[: pooling.dimensions], dtype=np.float32)
    output = StepOutput(request.request_id, [], FinishReason.STOP, None, num_cached_tokens)
    output.embedding = pack_vector(vector)
    output.queue_s, output.prefill_s = 0.001, 0.002
    return output


def make_failure(request: GenerateRequest, code: ErrorCode, message: str) -> StepOutput:
    return StepOutput(
        request.request_id,
        [],
        finish_reason=FinishReason.ERROR,
        error=OutputError(code, message),
    )


def _logprobs(token_id: int, num_top: int) -> TokenLogprobs:
    top = [token_id, *(i for i in range(3, 3 + num_top) if i != token_id)][:num_top]
    return TokenLogprobs(-0.5, 1, top, [-0.5 - i for i in range(len(top))])


class FakeStream:
    """Plays outputs, one an event-loop turn or, with a gate, one a permit."""

    def __init__(self, outputs: Sequence[StepOutput], gate: asyncio.Semaphore | None) -> None:
        self._outputs = list(outputs)
        self._gate = gate
        self.is_finished = False
        self.is_aborted = False

    def __aiter__(self) -> "FakeStream":
        return self

    async def __anext__(self) -> StepOutput:
        if self.is_finished or self.is_aborted or not self._outputs:
            raise StopAsyncIteration
        if self._gate is None:
            await asyncio.sleep(0)
        else:
            await self._gate.acquire()
        output = self._outputs.pop(0)
        self.is_finished = output.finish_reason is not None
        return output

    async def aclose(self) -> None:
        if not self.is_finished:
            self.is_aborted = True


class FakeBackend:
    """script: the outputs of a request. refusal: raised by submit instead. gate: see FakeStream."""

    def __init__(self, script: Script, info: ModelInfo = MODEL_INFO) -> None:
        self.script = script
        self.info = info
        self.refusal: ApiError | None = None
        self.is_full = False
        self.gate: asyncio.Semaphore | None = None
        self.requests: list[GenerateRequest] = []
        self.contexts: list[RequestContext] = []
        self.streams: list[FakeStream] = []
        self._by_id: dict[str, FakeStream] = {}

    def check_admission(self) -> None:
        if self.is_full:
            raise ApiError(ApiErrorCode.OVERLOADED, "full")

    async def submit(self, request: GenerateRequest, context: RequestContext) -> FakeStream:
        if self.refusal is not None:
            raise self.refusal
        before = self._by_id.get(request.request_id)
        if before is not None and not (before.is_finished or before.is_aborted):
            raise ValueError(f"request id {request.request_id} is live already")
        self.requests.append(request)
        self.contexts.append(context)
        stream = FakeStream(self.script(request), self.gate)
        self.streams.append(stream)
        self._by_id[request.request_id] = stream
        return stream

    @property
    def num_live(self) -> int:
        return sum(not (stream.is_finished or stream.is_aborted) for stream in self.streams)
