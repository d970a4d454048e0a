"""Runs: responses under way in this process, which others may have stopped."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from service.errors import ApiError
from service.response_store.records import ResponseName
from service.response_store.store import ResponseStore

T = TypeVar("T")
_WATCH_TIMEOUT_S = 5.0
_RETRY_S = 1.0
_FINISH_S = 5.0
_log = logging.getLogger(__name__)


class Run:
    """One of them. Its work is awaited through wait_for()."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._scope: asyncio.Timeout | None = None

    def cancel(self) -> None:
        self.is_cancelled = True
        if self._scope is not None:
            self._scope.reschedule(asyncio.get_running_loop().time())

    async def wait_for(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Its result; None once the run is cancelled, and the work with it."""
        if self.is_cancelled:
            return None
        scope = asyncio.timeout(None)
        try:
            async with scope:
                self._scope = scope
                return await work()
        except TimeoutError:
            if not scope.expired():
                raise
            return None
        finally:
            self._scope = None


class Runs:
    """runner: names this process to the store, which takes no response of more than
    max_response_bytes."""

    def __init__(self, runner: str, store: ResponseStore, max_response_bytes: int) -> None:
        self.runner = runner
        self.store = store
        self.max_response_bytes = max_response_bytes
        self._runs: dict[ResponseName, Run] = {}
        self._held: set[asyncio.Task[None]] = set()

    def add(self, name: ResponseName) -> Run:
        """To be removed when it is over."""
        run = self._runs[name] = Run()
        return run

    def remove(self, name: ResponseName) -> None:
        self._runs.pop(name, None)

    def hold(self, work: Coroutine[Any, Any, None]) -> None:
        """Work that nobody waits for; until it is done it is kept here."""
        task = asyncio.create_task(work)
        self._held.add(task)
        task.add_done_callback(self._held.discard)

    async def finish(self) -> None:
        """Wait for a moment until what is held has told the store how it ended, then stop it."""
        if self._held:
            _, late = await asyncio.wait(self._held, timeout=_FINISH_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)

    async def follow(self) -> None:
        """Stop what others have cancelled, for ever."""
        while True:
            try:
                names = await self.store.cancellations(self.runner, _WATCH_TIMEOUT_S)
            except ApiError as error:
                _log.warning("stored responses: %s", error)
                await asyncio.sleep(_RETRY_S)
                continue
            for name in names:
                if name in self._runs:
                    self._runs[name].cancel()
