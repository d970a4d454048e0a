"""Requests whose replica was lost before their first output, waiting for another replica.

Knows no links and no policy: it tries again whenever it is told that something has changed.
"""

import asyncio
from collections.abc import Callable

from service.api.errors import ApiError
from service.routed_stream import RoutedStream


class Parking:
    """Parked streams in order of arrival, each for at most as long as it was parked for.

    route sends a stream to a replica and raises ApiError if none takes it; the last such error is
    what a stream ends with when its time is up. Use from one event loop.
    """

    def __init__(self, route: Callable[[RoutedStream], None]) -> None:
        self._route = route
        self._timers: dict[RoutedStream, asyncio.TimerHandle] = {}
        self._is_closed = False

    @property
    def is_open(self) -> bool:
        """Whether a stream may be parked."""
        return not self._is_closed

    @property
    def num_requests(self) -> int:
        return sum(not stream.is_ended for stream in self._timers)

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of what is parked."""
        return sum(
            len(stream.request.prompt_token_ids) for stream in self._timers if not stream.is_ended
        )

    def park(self, stream: RoutedStream, wait_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._timers[stream] = loop.call_later(wait_s, self._give_up, stream)

    def on_change(self) -> None:
        """Try every parked stream again; those that find a replica leave."""
        for stream in list(self._timers):
            if stream.is_ended or self._try(stream) is None:
                self._timers.pop(stream).cancel()

    def close(self) -> None:
        """End all that are parked and park no more."""
        self._is_closed = True
        for stream in list(self._timers):
            self._give_up(stream)

    def _give_up(self, stream: RoutedStream) -> None:
        self._timers.pop(stream).cancel()
        if not stream.is_ended:
            error = self._try(stream)
            if error is not None:
                stream.fail(error)

    def _try(self, stream: RoutedStream) -> ApiError | None:
        try:
            self._route(stream)
        except ApiError as error:
            return error
        return None
