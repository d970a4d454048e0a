"""Many inputs of one request, of which so many are under way at a time. Knows no protocol.

A crowd of inputs would take every place of a queue that others stand in too, and all of the
tokenizer's; a window keeps the engine as busy.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Self, TypeVar

from service.backend import GenerationBackend, TokenStream
from service.errors import ApiError, ApiErrorCode
from service.request_context import RequestContext
from workers.engine.protocol import GenerateRequest, StepOutput

T = TypeVar("T")
R = TypeVar("R")


async def in_turns(
    items: Sequence[T], work: Callable[[T], Awaitable[R]], max_at_once: int
) -> list[R]:
    """Results in the items' order. The first exception ends the others and is raised."""
    results: dict[int, R] = {}
    waiting = iter(enumerate(items))

    async def take_turns() -> None:
        for index, item in waiting:
            results[index] = await work(item)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(take_turns()) for _ in range(min(max_at_once, len(items)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return [results[index] for index in range(len(items))]


class Turns:
    """The streams of one request. max_at_once: those that its owner reads at a time.

    One that is refused for lack of room waits until another of the request has ended: what was
    computed is not lost to a crowd that came meanwhile. Where no other is under way, it is refused.
    """

    def __init__(self, backend: GenerationBackend, context: RequestContext) -> None:
        self._backend = backend
        self._context = context
        self._num_open = 0
        self._ended = asyncio.Event()

    async def open(self, spec: GenerateRequest, *, can_wait: bool) -> TokenStream:
        while True:
            self._ended.clear()
            try:
                stream = await self._backend.submit(spec, self._context)
            except ApiError as error:
                is_full = error.code is ApiErrorCode.OVERLOADED
                if not (can_wait and is_full and self._num_open):
                    raise
            else:
                self._num_open += 1
                return stream
            await self._ended.wait()

    def on_end(self) -> None:
        self._num_open -= 1
        self._ended.set()


class TurnStream:
    """A TokenStream that is submitted by open(), or when its first output is asked for."""

    def __init__(self, turns: Turns, spec: GenerateRequest) -> None:
        self._turns = turns
        self._spec = spec
        self._stream: TokenStream | None = None
        self._is_closed = False

    async def open(self) -> Self:
        """Raises ApiError where there is no room now."""
        self._stream = await self._turns.open(self._spec, can_wait=False)
        return self

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> StepOutput:
        if self._is_closed:
            raise StopAsyncIteration
        if self._stream is None:
            self._stream = await self._turns.open(self._spec, can_wait=True)
        return await anext(self._stream)

    async def aclose(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._stream is not None:
            self._turns.on_end()
            await self._stream.aclose()
