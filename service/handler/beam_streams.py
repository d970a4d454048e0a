"""Streams of a beam search: the search asks engines for one token of every beam at a time, whose
prefixes they have cached, and each of the best beams is one output of one stream.

Knows no protocol.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from service.backend import GenerationBackend, TokenStream
from service.errors import ApiError, ApiErrorCode
from service.handler.beams import Beam, BeamOptions, BeamSearch, Tops
from service.handler.choice import raise_if_failed
from service.request_context import RequestContext
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.sampling.params import MAX_LOGPROBS, SamplingParams


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """spec: of the whole text, as if it were sampled. num_beams: as many are wanted as are kept."""

    spec: GenerateRequest
    num_beams: int
    options: BeamOptions
    ending_ids: frozenset[int]


class SearchRun:
    """Runs from when it is made, in a task of its own, until it is over or nobody wants it."""

    def __init__(
        self, plan: SearchPlan, backend: GenerationBackend, context: RequestContext
    ) -> None:
        self._plan = plan
        self._backend = backend
        self._context = context
        self._num_steps = 0
        self._first: StepOutput | None = None
        self._task = asyncio.create_task(self._run())

    async def outputs(self) -> list[StepOutput]:
        """Raises ApiError."""
        return await asyncio.shield(self._task)

    async def aclose(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> list[StepOutput]:
        plan, sampling = self._plan, self._plan.spec.sampling
        max_tokens = sampling.max_tokens
        if max_tokens is None:
            raise ValueError("a beam search needs a longest length")
        search = BeamSearch(
            plan.num_beams, plan.options, plan.ending_ids, max_tokens, sampling.logprobs or 0
        )
        while search.live:
            search.advance(await self._next_tokens(search.live, search.num_candidates))
        best = search.best(plan.num_beams)
        return [self._output(beam) for beam in best]

    async def _next_tokens(self, beams: Sequence[Beam], num_candidates: int) -> list[Tops]:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            logprobs=min(num_candidates, MAX_LOGPROBS),
        )
        spec, self._num_steps = self._plan.spec, self._num_steps + 1
        requests = [
            msgspec.structs.replace(
                spec,
                request_id=f"{spec.request_id}-{self._num_steps}-{index}",
                prompt_token_ids=[*spec.prompt_token_ids, *beam.token_ids],
                sampling=sampling,
            )
            for index, beam in enumerate(beams)
        ]
        tasks = [asyncio.create_task(self._ask(request)) for request in requests]
        try:
            outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if self._first is None:
            self._first = outputs[0]
        return [_top_of(output) for output in outputs]

    async def _ask(self, request: GenerateRequest) -> StepOutput:
        stream: TokenStream = await self._backend.submit(request, self._context)
        try:
            async for output in stream:
                raise_if_failed(output)
                if output.logprobs:
                    return output
        finally:
            await stream.aclose()
        raise ApiError(ApiErrorCode.REPLICA_LOST, "the stream of a beam broke off")

    def _output(self, beam: Beam) -> StepOutput:
        last = beam.token_ids[-1]
        is_ended = last in self._plan.ending_ids
        sampling, first = self._plan.spec.sampling, self._first
        output = StepOutput(
            self._plan.spec.request_id,
            list(beam.token_ids),
            FinishReason.STOP if is_ended else FinishReason.LENGTH,
            last if is_ended else None,
        )
        if sampling.logprobs is not None:
            output.logprobs = list(beam.entries)
        if first is not None:
            output.num_cached_tokens = first.num_cached_tokens
            output.queue_s, output.prefill_s = first.queue_s, first.prefill_s
        return output


class BeamStream:
    """A TokenStream: the index-th best beam of a search."""

    def __init__(self, run: SearchRun, index: int) -> None:
        self._run = run
        self._index = index
        self._is_read = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepOutput:
        if self._is_read:
            raise StopAsyncIteration
        self._is_read = True
        outputs = await self._run.outputs()
        if self._index >= len(outputs):
            message = "the search ended with fewer beams than were asked for"
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "n")
        return outputs[self._index]

    async def aclose(self) -> None:
        await self._run.aclose()


def _top_of(output: StepOutput) -> Tops:
    entry = (output.logprobs or [])[0]
    return entry.top_token_ids, entry.top_logprobs


def search_streams(
    plans: Sequence[SearchPlan], backend: GenerationBackend, context: RequestContext
) -> list[TokenStream]:
    """Those of each plan's beams, in order."""
    streams: list[TokenStream] = []
    for plan in plans:
        run = SearchRun(plan, backend, context)
        streams += [BeamStream(run, index) for index in range(plan.num_beams)]
    return streams
