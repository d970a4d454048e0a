"""Requests of an ingress that no replica has: new ones whose model is scaled to zero, and those
whose replica was lost. They wait, bounded, those first that somebody has been reading.

Knows no links and no policy: whoever owns it says when waiting makes sense and when to try again.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.autoscaling.settings import WaitingSettings
from service.errors import ApiError, ApiErrorCode
from service.routing.routed_stream import RoutedStream

Route = Callable[[RoutedStream], None]
OnLeave = Callable[[ApiError | None], None]


@dataclass(frozen=True, slots=True)
class _Place:
    """timer: tries for the last time. on_leave: told once how the wait ended, unless by leave()."""

    timer: asyncio.TimerHandle
    on_leave: OnLeave


class WaitingRoom:
    """Use from one event loop.

    settings: for new requests. route sends a stream to a replica and raises ApiError if none takes
    it now. on_arrival: called when somebody comes into the empty room. on_left: seconds that a new
    request waited, served or not.
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
        self._places: dict[RoutedStream, _Place] = {}
        self._is_closed = False

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def num_requests(self) -> int:
        return len(self._places)

    @property
    def num_tokens(self) -> int:
        """Prompts and the output that there is of them."""
        return sum(stream.num_tokens for stream in self._places)

    def check(self) -> None:
        """Raise ApiError OVERLOADED if no new request may come in."""
        if len(self._places) >= self._settings.max_requests:
            raise self._full()

    async def wait(self, stream: RoutedStream) -> None:
        """Return once a replica has the new request.

        Raises ApiError: OVERLOADED if the room is full, UNAVAILABLE when the time is up, or what
        dismiss() was given. Whoever is cancelled here is out of the room.
        """
        self.check()
        if self._places and self.num_tokens + stream.num_tokens > self._settings.max_tokens:
            raise self._full()
        started_s = time.monotonic()
        placed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def on_leave(error: ApiError | None) -> None:
            if placed.done():
                return
            if error is None:
                placed.set_result(None)
            else:
                placed.set_exception(error)

        self.hold(stream, self._settings.wait_s, self._late(), on_leave)
        try:
            await placed
        except asyncio.CancelledError:
            self.leave(stream)
            raise
        finally:
            # Not out of the room: a stream that found a replica may have lost it, and be held anew.
            self._on_left(time.monotonic() - started_s)

    def hold(self, stream: RoutedStream, wait_s: float, late: ApiError, on_leave: OnLeave) -> None:
        """Keep a stream for at most wait_s, whatever the room holds. on_leave is told None when a
        replica has it, `late` when its time is up, or what dismiss() was given."""
        was_empty = not self._places
        timer = asyncio.get_running_loop().call_later(wait_s, self._give_up, stream, late)
        self._places[stream] = _Place(timer, on_leave)
        if was_empty:
            self._on_arrival()

    def leave(self, stream: RoutedStream) -> None:
        """The stream goes of its own accord, if it is here; nobody is told."""
        place = self._places.pop(stream, None)
        if place is not None:
            place.timer.cancel()

    def on_change(self) -> None:
        """Try everybody again; those that find a replica leave. First those that somebody has been
        reading; of these, and of the others, those with most lost replicas last."""
        order = sorted(self._places, key=lambda one: (not one.has_output, one.num_losses))
        for stream in order:
            if self._is_placed(stream):
                self._dismiss(stream, None)

    def dismiss(self, error: ApiError) -> None:
        """Waiting is in vain: everybody leaves with this error."""
        for stream in list(self._places):
            self._dismiss(stream, error)

    def close(self, error: ApiError) -> None:
        """Nobody may wait any more."""
        self._is_closed = True
        self.dismiss(error)

    def _give_up(self, stream: RoutedStream, late: ApiError) -> None:
        self._dismiss(stream, None if self._is_placed(stream) else late)

    def _is_placed(self, stream: RoutedStream) -> bool:
        try:
            self._route(stream)
        except ApiError:
            return False
        return True

    def _dismiss(self, stream: RoutedStream, error: ApiError | None) -> None:
        place = self._places.pop(stream, None)
        if place is not None:
            place.timer.cancel()
            place.on_leave(error)

    def _late(self) -> ApiError:
        return ApiError(
            ApiErrorCode.UNAVAILABLE,
            f"the model was not loaded within {self._settings.wait_s:g} s",
            retry_after_s=self._settings.retry_after_s,
        )

    def _full(self) -> ApiError:
        return ApiError(
            ApiErrorCode.OVERLOADED,
            "too many requests wait for the model to be loaded",
            retry_after_s=self._settings.retry_after_s,
        )
