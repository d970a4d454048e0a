"""A generation under way: its streams, its deltas, its usage. Ends everything it started.

Knows clocks and metrics. Knows no protocol and no tokeniser process.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self

from service.backend import TokenStream
from service.errors import ApiError, ApiErrorCode
from service.handler.chats import Assembler
from service.handler.choice import is_failure
from service.handler.delta_buffer import DeltaBuffer
from service.handler.echo import PromptEcho
from service.handler.embedding import VectorAssembler
from service.handler.events import ChoiceDelta, Usage
from service.handler.merge import merge
from service.handler.metrics import RequestMetrics
from service.handler.requests import GenerationRequest
from service.observability.request_log.record import ChoiceTimes, RequestRecord
from service.security.quota import Lease
from service.tokenizer.pieces import TokenPieces
from workers.engine.protocol import StepOutput

# Outputs that piled up are merged: after one of so many tokens others have their turn.
_TOKENS_PER_TURN = 256


@dataclass(slots=True)
class ChoiceRun:
    """One engine request and what came of it. Times are of the generation's clock, seconds.

    echo: what comes before its first token, until that came. buffer: of deltas, where they are
    not to be told one by one.
    """

    stream: TokenStream
    assembler: Assembler | VectorAssembler
    echo: PromptEcho | None
    prompt_token_ids: list[int]
    submitted_s: float
    buffer: DeltaBuffer | None = None
    num_cached_tokens: int = 0
    first_output_s: float | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
    last_output_s: float | None = None
    is_reported: bool = False


@dataclass(frozen=True, slots=True)
class GenerationInfo:
    """What renderers need to know besides the deltas. created_s: Unix time."""

    request_id: str
    model: str
    created_s: int
    prompts: list[list[int]]


@dataclass(slots=True)
class Generation:
    """Async context and iterator of ChoiceDeltas. Iterate once.

    Iteration raises ApiError when any choice fails, after the others were aborted. Leaving the
    context aborts whatever has not finished. max_at_once: runs that are read at a time. The last
    three fields are sums over its runs; what a prompt had cached counts once.
    """

    request: GenerationRequest
    info: GenerationInfo
    runs: list[ChoiceRun]
    pieces: TokenPieces
    metrics: RequestMetrics
    lease: Lease
    arrival_s: float
    clock: Callable[[], float]
    record: RequestRecord
    max_at_once: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_reported: int = 0

    def describe(self) -> None:
        """Write what is known of the request as a whole into its record."""
        record, usage = self.record, self.usage
        record.model = self.info.model
        record.num_prompt_tokens = usage.num_prompt_tokens
        record.num_cached_tokens = usage.num_cached_tokens
        record.num_output_tokens = usage.num_output_tokens

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, _: object, failure: BaseException | None, __: object) -> None:
        await self.aclose(failure)

    def __aiter__(self) -> AsyncGenerator[ChoiceDelta, None]:
        if len(self.runs) <= self.max_at_once:
            sources = [self._run_choice(run) for run in self.runs]
            return sources[0] if len(sources) == 1 else merge(sources)
        waiting = iter(self.runs)
        return merge([self._run_choices(waiting) for _ in range(self.max_at_once)])

    @property
    def usage(self) -> Usage:
        """Tokens so far; final once iteration has ended. Asked for with every chunk."""
        num_prompt_tokens = sum(map(len, self.info.prompts))
        return Usage(num_prompt_tokens, self.num_output_tokens, self.num_cached_tokens)

    async def aclose(self, failure: BaseException | None = None) -> None:
        """Abort what has not finished. Harmless when called twice.

        failure: what has ended it, if it was not the client.
        """
        reason = ApiErrorCode.INTERNAL.value if _is_bug(failure) else "abort"
        for run in self.runs:
            if not run.is_reported:
                self._report(run, reason)
        self.lease.end(self.usage.num_output_tokens)
        await asyncio.gather(*(run.stream.aclose() for run in self.runs))

    async def _run_choices(self, waiting: Iterator[ChoiceRun]) -> AsyncGenerator[ChoiceDelta, None]:
        """One after the other, as long as another reader has not taken the rest."""
        for run in waiting:
            async with aclosing(self._run_choice(run)) as deltas:
                async for delta in deltas:
                    yield delta

    async def _run_choice(self, run: ChoiceRun) -> AsyncGenerator[ChoiceDelta, None]:
        try:
            async for output in run.stream:
                self._observe(run, output)
                if run.echo is not None:
                    async for part in self._echo(run, output):
                        yield part
                delta = self._push(run, output)
                if delta is not None:
                    yield delta
                if len(output.token_ids) > _TOKENS_PER_TURN:
                    await asyncio.sleep(0)
                if run.assembler.is_finished:
                    break
            if not run.assembler.is_finished:
                raise ApiError(ApiErrorCode.REPLICA_LOST, "the stream of this request broke off")
        except Exception as error:
            if not run.is_reported:
                code = error.code if isinstance(error, ApiError) else ApiErrorCode.INTERNAL
                self._report(run, code.value)
            raise
        finally:
            await run.stream.aclose()

    def _push(self, run: ChoiceRun, output: StepOutput) -> ChoiceDelta | None:
        num_before = run.assembler.num_output_tokens
        delta = run.assembler.push(output)
        self.num_output_tokens += run.assembler.num_output_tokens - num_before
        if run.assembler.is_finished:
            self._report(run, run.assembler.finish_reason or "")
        if delta is None or run.buffer is None:
            return delta
        return run.buffer.add(delta)

    async def _echo(self, run: ChoiceRun, output: StepOutput) -> AsyncGenerator[ChoiceDelta, None]:
        """What comes before the first output's own delta; nothing if that is a failure."""
        echo, run.echo = run.echo, None
        if echo is None or is_failure(output):
            return
        async for part in echo.deltas(self.pieces, output.prompt_logprobs):
            yield part

    def _observe(self, run: ChoiceRun, output: StepOutput) -> None:
        count = len(output.token_ids)
        if not count and not output.embedding:
            return
        now_s = self.clock()
        if run.last_output_s is None:
            run.num_cached_tokens = output.num_cached_tokens
            if run.assembler.index % (len(self.runs) // len(self.info.prompts)) == 0:
                self.num_cached_tokens += output.num_cached_tokens
            run.first_output_s = now_s
            run.queue_s, run.prefill_s = output.queue_s, output.prefill_s
            self._count_first(now_s, output)
        else:
            self.metrics.on_tokens(count, (now_s - run.last_output_s) / count)
        run.last_output_s = now_s

    def _count_first(self, now_s: float, output: StepOutput) -> None:
        if output.embedding:
            self.metrics.on_vector(output.queue_s, output.prefill_s)
        else:
            self.metrics.on_first_token(now_s - self.arrival_s, output.queue_s, output.prefill_s)

    def _report(self, run: ChoiceRun, reason: str) -> None:
        run.is_reported = True
        ended_s = self.clock()
        self.record.choices.append(
            ChoiceTimes(
                submitted_s=run.submitted_s,
                first_output_s=run.first_output_s,
                ended_s=ended_s,
                queue_s=run.queue_s,
                prefill_s=run.prefill_s,
                reason=reason,
                num_output_tokens=run.assembler.num_output_tokens,
            )
        )
        self.num_reported += 1
        if self.num_reported == len(self.runs):
            self.describe()
        self.metrics.on_finished(
            reason,
            num_prompt_tokens=len(run.prompt_token_ids),
            num_cached_tokens=run.num_cached_tokens,
            num_output_tokens=run.assembler.num_output_tokens,
            e2e_s=ended_s - self.arrival_s,
        )


def _is_bug(failure: BaseException | None) -> bool:
    """Neither None, nor a cancellation, nor what the client is told by name."""
    return isinstance(failure, Exception) and not isinstance(failure, ApiError)
