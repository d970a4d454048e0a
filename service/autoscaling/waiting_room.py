"""Requests of an ingress whose model has no replica yet: they wait, bounded, in order of arrival.

Knows no links and no policy: whoever owns it says when waiting makes sense and when to try again.
"""

import asyncio
import time
from collections.abc import Callable

from service.api.errors import ApiError, ApiErrorCode
from service.autoscaling.settings import WaitingSettings
from service.routed_stream import RoutedStream

Route = Callable[[RoutedStream], None]


class WaitingRoom:
    """Use from one event loop.

    route sends a stream to a replica and raises ApiError if none takes it now. on_arrival: called
    when somebody comes into the empty room. on_left: seconds that somebody waited, served or not.
    """

    def __init__(
        self,
        settings: WaitingSettings,
        route: Route,
        on_arrival: Callable[[], None],
        on_left: Callable[[float], None],
    ) -> None:
        self._settings = settings
        self._route = route
        self._on_arrival = on_arrival
        self._on_left = on_left
        self._waiting: dict[RoutedStream, asyncio.Future[None]] = {}
        self._is_open = False

    @property
    def is_open(self) -> bool:
        """Whether a replica would be started for who waits."""
        return self._is_open

    @property
    def num_requests(self) -> int:
        return len(self._waiting)

    @property
    def num_tokens(self) -> int:
        return sum(len(stream.request.prompt_token_ids) for stream in self._waiting)

    def open(self) -> None:
        self._is_open = True

    def shut(self) -> None:
        """Nobody comes in any more; those inside go on waiting."""
        self._is_open = False

    def dismiss(self, error: ApiError) -> None:
        """Waiting is in vain: everybody leaves with this error."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)

    def check(self) -> None:
        """Raise ApiError OVERLOADED if nobody else may come in."""
        if len(self._waiting) >= self._settings.max_requests:
            raise self._full()

    async def wait(self, stream: RoutedStream) -> None:
        """Return once a replica has the stream's request.

        Raises ApiError: OVERLOADED if the room is full, UNAVAILABLE when the time is up, or what
        dismiss() was given. Whoever is cancelled here is out of the room.
        """
        self.check()
        num_tokens = len(stream.request.prompt_token_ids)
        if self._waiting and self.num_tokens + num_tokens > self._settings.max_tokens:
            raise self._full()
        started_s = time.monotonic()
        was_empty = not self._waiting
        future = self._waiting[stream] = asyncio.get_running_loop().create_future()
        if was_empty:
            self._on_arrival()
        try:
            async with asyncio.timeout(self._settings.wait_s):
                await future
        except TimeoutError:
            raise ApiError(
                ApiErrorCode.UNAVAILABLE,
                f"the model was not loaded within {self._settings.wait_s:g} s",
                retry_after_s=self._settings.retry_after_s,
            ) from None
        finally:
            self._waiting.pop(stream, None)
            self._on_left(time.monotonic() - started_s)

    def on_change(self) -> None:
        """Try everybody again; those that find a replica leave."""
        for stream, future in list(self._waiting.items()):
            if future.done():
                continue
            try:
                self._route(stream)
            except ApiError:
                continue
            future.set_result(None)

    def _full(self) -> ApiError:
        return ApiError(
            ApiErrorCode.OVERLOADED,
            "too many requests wait for the model to be loaded",
            retry_after_s=self._settings.retry_after_s,
        )
