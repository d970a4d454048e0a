"""A thinking budget: after so many tokens of thinking its end mark is said for the model, which
then goes on from there.

A stream that is cut asks a backend to go on from the tokens so far and the mark, as one does that
has lost its replica: what comes behind the budget was drawn for nothing, and nothing else depends
on when it was cut. So a text is the same wherever it is computed. Knows no protocol.
"""

from dataclasses import dataclass
from typing import Self

import msgspec

from service.backend import GenerationBackend, TokenStream
from service.request_context import RequestContext
from service.routing.resumption import with_seed
from service.tokenizer.pieces import TokenPieces
from workers.engine.protocol import FinishReason, GenerateRequest, ModelInfo, StepOutput

_MAX_TAIL_BYTES = 512


@dataclass(frozen=True, slots=True)
class ThinkingPlan:
    """max_tokens: of thinking. begin, end: its marks. end_ids: the tokens that say the end.
    is_open: the prompt ends within thinking."""

    max_tokens: int
    begin: bytes
    end: bytes
    end_ids: tuple[int, ...]
    is_open: bool
    pieces: TokenPieces


class ThinkingMeter:
    """Counts the first thinking of one choice, token by token."""

    def __init__(self, plan: ThinkingPlan) -> None:
        self._plan = plan
        self._tail = b""
        self._num_tokens = 0
        self._has_begun = plan.is_open
        self.is_over = False

    @property
    def is_spent(self) -> bool:
        """Whether the thinking has to end here."""
        return self._has_begun and not self.is_over and self._num_tokens >= self._plan.max_tokens

    def push(self, token_id: int) -> None:
        if self.is_over:
            return
        self._tail = (self._tail + self._plan.pieces.token_bytes(token_id))[-_MAX_TAIL_BYTES:]
        if not self._has_begun:
            if self._plan.begin in self._tail:
                self._has_begun, self._tail = True, b""
            return
        self._num_tokens += 1
        if self._plan.end in self._tail:
            self.is_over = True


class BudgetedStream:
    """A TokenStream. open() before it is read."""

    def __init__(
        self,
        plan: ThinkingPlan,
        spec: GenerateRequest,
        backend: GenerationBackend,
        context: RequestContext,
    ) -> None:
        self._plan = plan
        self._spec = with_seed(spec)
        self._backend = backend
        self._context = context
        self._meter = ThinkingMeter(plan)
        self._known: list[int] = []
        self._stream: TokenStream | None = None
        self._forced: StepOutput | None = None

    async def open(self) -> None:
        """Raises ApiError."""
        if self._meter.is_spent:
            self._force()
        else:
            self._stream = await self._backend.submit(self._spec, self._context)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepOutput:
        if self._forced is not None:
            return await self._go_on()
        if self._stream is None:
            raise StopAsyncIteration
        output = await anext(self._stream)
        if not self._meter.is_over and self._cut(output):
            await self._stream.aclose()
            self._stream = None
        return output

    async def aclose(self) -> None:
        if self._stream is not None:
            await self._stream.aclose()

    def _cut(self, output: StepOutput) -> bool:
        """Take in tokens. Whether the budget ends there: those behind it are dropped."""
        for position, token_id in enumerate(output.token_ids):
            self._meter.push(token_id)
            self._known.append(token_id)
            is_last = position == len(output.token_ids) - 1
            if self._meter.is_spent and not (is_last and output.finish_reason is not None):
                del output.token_ids[position + 1 :]
                output.finish_reason = output.stop_token_id = output.error = None
                self._force()
                return True
        return False

    def _force(self) -> None:
        """The mark's tokens are next, as far as the output may be so long."""
        max_tokens = self._spec.sampling.max_tokens
        end_ids = list(self._plan.end_ids)
        self._forced = StepOutput(self._spec.request_id, end_ids)
        if max_tokens is not None and len(self._known) + len(end_ids) >= max_tokens:
            self._forced.token_ids = end_ids[: max_tokens - len(self._known)]
            self._forced.finish_reason = FinishReason.LENGTH
        self._known += self._forced.token_ids
        self._meter.is_over = True

    async def _go_on(self) -> StepOutput:
        forced, self._forced = self._forced, None
        if forced is None:
            raise StopAsyncIteration
        if forced.finish_reason is None:
            resumed = msgspec.structs.replace(
                self._spec,
                request_id=f"{self._spec.request_id}-thought",
                resumed_token_ids=self._known,
            )
            self._stream = await self._backend.submit(resumed, self._context)
        return forced


class BudgetedBackend:
    """A GenerationBackend whose streams keep a budget."""

    def __init__(self, plan: ThinkingPlan, backend: GenerationBackend) -> None:
        self._plan = plan
        self._backend = backend

    @property
    def info(self) -> ModelInfo:
        return self._backend.info

    def check_admission(self) -> None:
        self._backend.check_admission()

    async def submit(self, request: GenerateRequest, context: RequestContext) -> TokenStream:
        stream = BudgetedStream(self._plan, request, self._backend, context)
        await stream.open()
        return stream
