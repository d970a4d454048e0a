"""Merges the parts of several choices into one stream, in the order in which they become known."""

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

T = TypeVar("T")

_ITEMS_PER_SOURCE = 4


async def merge(sources: list[AsyncGenerator[T, None]]) -> AsyncGenerator[T, None]:
    """Items of all sources until every one has ended.

    The first exception of a source ends the merge and is raised. A slow reader stops the sources:
    at most a few items of each are kept. All sources are closed at the end, however it comes.
    """
    queue: asyncio.Queue[T | _End] = asyncio.Queue(_ITEMS_PER_SOURCE * len(sources))
    tasks = [asyncio.create_task(_pump(source, queue)) for source in sources]
    num_open = len(tasks)
    try:
        while num_open:
            item = await queue.get()
            if not isinstance(item, _End):
                yield item
            elif item.error is not None:
                raise item.error
            else:
                num_open -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _End:
    """A source is over."""

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


async def _pump(source: AsyncGenerator[T, None], queue: "asyncio.Queue[T | _End]") -> None:
    error: BaseException | None = None
    try:
        async for item in source:
            await queue.put(item)
    except Exception as failure:  # noqa: BLE001 - handed to the reader, who raises it
        error = failure
    finally:
        await source.aclose()
    await queue.put(_End(error))
