"""ResponseStore: what an API asks of wherever responses are kept, and one within this process."""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from service.response_store.records import (
    BegunResponse,
    EndedResponse,
    ResponseName,
    State,
    StoredResponse,
    StoreLimits,
)
from service.response_store.shelf import ResponseShelf


class ResponseStore(Protocol):
    """Every call may raise ApiError UNAVAILABLE where the store cannot be reached."""

    async def begin(self, response: BegunResponse) -> None: ...

    async def end(self, response: EndedResponse) -> bool:
        """Whether it is kept."""
        ...

    async def get(self, name: ResponseName) -> StoredResponse | None: ...

    async def conversation(self, name: ResponseName, max_bytes: int) -> list[bytes] | None:
        """JSON arrays of items: the response's input and output, after those of all that it
        follows. None if there is none, or it has more than max_bytes."""
        ...

    async def delete(self, name: ResponseName) -> bool:
        """Whether it was there."""
        ...

    async def cancel(self, name: ResponseName, timeout_s: float) -> StoredResponse | None:
        """Have it stopped where it runs; what it is then, at the latest at timeout."""
        ...

    async def cancellations(self, runner: str, timeout_s: float) -> list[ResponseName]:
        """Those of the runner that have to stop: as soon as there are any, or none at timeout."""
        ...


class LocalResponseStore:
    """Implements ResponseStore. Use from one event loop."""

    def __init__(self, limits: StoreLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._shelf = ResponseShelf(limits, clock)
        self._changed = asyncio.Condition()

    def limit(self, limits: StoreLimits) -> None:
        """These hold from now on; what is there goes when the next response comes."""
        self._shelf.limits = limits

    async def begin(self, response: BegunResponse) -> None:
        self._shelf.begin(response)

    async def end(self, response: EndedResponse) -> bool:
        is_kept = self._shelf.end(response)
        await self._notify()
        return is_kept

    async def get(self, name: ResponseName) -> StoredResponse | None:
        return self._shelf.get(name)

    async def conversation(self, name: ResponseName, max_bytes: int) -> list[bytes] | None:
        return self._shelf.conversation(name, max_bytes)

    async def delete(self, name: ResponseName) -> bool:
        return self._shelf.delete(name)

    async def cancel(self, name: ResponseName, timeout_s: float) -> StoredResponse | None:
        if self._shelf.cancel(name):
            await self._notify()
            await self._wait_until(lambda: not self._is_cancelling(name), timeout_s)
        return self._shelf.get(name)

    async def cancellations(self, runner: str, timeout_s: float) -> list[ResponseName]:
        names: list[ResponseName] = []

        def are_there() -> bool:
            self._shelf.hear(runner)
            names.extend(self._shelf.cancelled_of(runner))
            return bool(names)

        await self._wait_until(are_there, timeout_s)
        return names

    def _is_cancelling(self, name: ResponseName) -> bool:
        found = self._shelf.get(name)
        return found is not None and found.state is State.CANCELLING

    async def _wait_until(self, is_so: Callable[[], bool], timeout_s: float) -> None:
        """Or until the time is over."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(is_so), timeout_s)
            except TimeoutError:
                return

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
