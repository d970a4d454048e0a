"""Sequences of a request on their way to engines. Knows no text and no protocol."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec

from service.backend import GenerationBackend, TokenStream
from service.handler.encoding import EnginePrompt
from service.handler.requests import GenerationRequest
from service.handler.turns import Turns, TurnStream
from service.request_context import RequestContext
from service.security.callers import Caller
from workers.engine.protocol import GenerateRequest
from workers.pooling.params import PoolingParams
from workers.sampling.params import MAX_SEED, SamplingParams

# Of one request; then others have their turn.
_PER_TURN = 64
T = TypeVar("T")


async def engine_requests(
    request: GenerationRequest,
    caller: Caller,
    prompts: Sequence[EnginePrompt],
    unique_id: str,
    grammar: str,
    pooling: PoolingParams | None,
) -> list[GenerateRequest]:
    """Every choice of every prompt, in order. unique_id: no other request in this process has it
    now."""
    made = []
    for i, prompt in enumerate(prompts):
        for j in range(request.n):
            made.append(
                GenerateRequest(
                    request_id=f"{unique_id}-{i}-{j}",
                    prompt_token_ids=prompt.token_ids,
                    sampling=_sampling_of_choice(request.sampling, prompt.max_tokens, j),
                    priority=request.priority,
                    cache_salt=caller.salted(request.cache_salt),
                    grammar=grammar,
                    encoder_input=prompt.source,
                    content_spans=prompt.spans,
                    media=prompt.images,
                    pooling=pooling,
                    second_text_start=prompt.second_start,
                    max_draft_tokens=request.max_draft_tokens,
                )
            )
            if len(made) % _PER_TURN == 0:
                await asyncio.sleep(0)
    return made


def _sampling_of_choice(sampling: SamplingParams, max_tokens: int, choice: int) -> SamplingParams:
    """Choices of one prompt differ in their seed only; seeds wrap around at the top."""
    seed = sampling.seed
    if seed is not None and choice:
        seed = seed + choice if seed <= MAX_SEED - choice else seed - MAX_SEED + choice - 1
    return msgspec.structs.replace(sampling, max_tokens=max_tokens, seed=seed)


async def submit_all(
    backend: GenerationBackend,
    specs: Sequence[GenerateRequest],
    context: RequestContext,
    max_at_once: int,
) -> list[TokenStream]:
    """All streams; those behind the first max_at_once are submitted when they are read. If one of
    the first is refused there are none."""
    if len(specs) == 1:
        return [await backend.submit(specs[0], context)]
    if len(specs) <= max_at_once:
        return await _all_or_none(specs, lambda spec: backend.submit(spec, context))
    turns = Turns(backend, context)
    streams: list[TokenStream] = []
    opened = [TurnStream(turns, spec) for spec in specs]
    await _all_or_none(opened[:max_at_once], TurnStream.open)
    streams.extend(opened)
    return streams


async def _all_or_none(
    items: Sequence[T], submit: Callable[[T], Coroutine[Any, Any, TokenStream]]
) -> list[TokenStream]:
    tasks: list[asyncio.Task[TokenStream]] = []
    try:
        for item in items:
            tasks.append(asyncio.create_task(submit(item)))
            if len(tasks) % _PER_TURN == 0:
                await asyncio.sleep(0)
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        streams = [result for result in results if not isinstance(result, BaseException)]
        await asyncio.gather(*(stream.aclose() for stream in streams))
        raise
