"""Whole results of offline generation, put together from step outputs. Knows no engine."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from workers.engine.logprobs import TokenLogprobs
from workers.engine.protocol import FinishReason, OutputError, StepOutput
from workers.pooling.vectors import FloatArray, unpack_vector


@dataclass(slots=True)
class GenerateResult:
    """One finished request. Fields as in StepOutput, of all steps. embedding: float32 (n,)."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: OutputError | None = None
    embedding: FloatArray | None = None


class ResultCollector:
    """Collects the outputs of expected requests, in the order they were expected."""

    def __init__(self) -> None:
        self._results: dict[str, GenerateResult] = {}
        self._num_waiting = 0

    @property
    def is_waiting(self) -> bool:
        return self._num_waiting > 0

    def expect(self, request_id: str) -> None:
        self._results[request_id] = GenerateResult(request_id)
        self._num_waiting += 1

    def add(self, outputs: Iterable[StepOutput]) -> None:
        """Append outputs; those of requests that nobody expects are ignored."""
        for output in outputs:
            result = self._results.get(output.request_id)
            if result is not None:
                self._add_one(result, output)

    def results(self) -> list[GenerateResult]:
        return list(self._results.values())

    def _add_one(self, result: GenerateResult, output: StepOutput) -> None:
        result.token_ids += output.token_ids
        result.num_cached_tokens += output.num_cached_tokens
        result.logprobs += output.logprobs or []
        if output.prompt_logprobs is not None:
            result.prompt_logprobs = [None, *output.prompt_logprobs.unpack()]
        if output.finish_reason is not None:
            result.finish_reason = output.finish_reason
            result.stop_token_id = output.stop_token_id
            result.error = output.error
            if output.embedding:
                result.embedding = unpack_vector(output.embedding)
            self._num_waiting -= 1
