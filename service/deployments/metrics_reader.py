"""Reads the application's metrics back from the exporter's actor, for the HTTP API.

Whatever number of clients ask, the actor is asked once in a while. Knows no route.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec
import ray

from service.errors import ApiError, ApiErrorCode
from service.observability.live import LiveState

KEEP_S = 0.5
"""How old an answer may be, on top of metrics.push_interval_s."""
TIMEOUT_S = 2.0
_decoder = msgspec.json.Decoder(LiveState)


class _Kept:
    """One method's last answer. Use from one event loop."""

    def __init__(self, method: Any, clock: Callable[[], float]) -> None:
        self._method = method
        self._clock = clock
        self._asking = asyncio.Lock()
        self._answer = b""
        self._until_s = float("-inf")

    async def get(self) -> bytes:
        """Raises ApiError UNAVAILABLE."""
        # Whoever waits for the lock finds the answer that somebody else has got meanwhile.
        async with self._asking:
            if self._clock() >= self._until_s:
                self._answer = await self._ask()
                self._until_s = self._clock() + KEEP_S
            return self._answer

    async def _ask(self) -> bytes:
        try:
            async with asyncio.timeout(TIMEOUT_S):
                answer: bytes = await self._method.remote()
        except (ray.exceptions.RayError, TimeoutError) as error:
            message = "the service's metrics cannot be read now"
            raise ApiError(ApiErrorCode.UNAVAILABLE, message) from error
        return answer


class ActorMetricsReader:
    """Implements service.api.web.MetricsReader. exporter: a handle of an ExporterActor."""

    def __init__(self, exporter: Any, clock: Callable[[], float] = time.monotonic) -> None:
        self._text = _Kept(exporter.text, clock)
        self._live = _Kept(exporter.live, clock)

    async def text(self) -> bytes:
        return await self._text.get()

    async def live(self) -> LiveState:
        return _decoder.decode(await self._live.get())
