"""Which requests may bring replicas down, and when these are sent to a replica again.

A request whose work ends the engine is moved like any other one, and takes the next replica along
with all that runs there. Requests of several lost replicas that had come to the last one shortly
before are suspects: they are tried one at a time, so that the next loss says which of them it was
(docs/decisions/0052). Knows no links.
"""

import time
from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakSet

from service.request_context import Losses
from service.routing.routed_stream import RoutedStream

SUSPECT_LOSSES = 2
"""Lost replicas from which on a request is a suspect: after the first one all move at once."""
MAX_LOST_TRIALS = 2
"""That end a request. One may be chance: what ends replicas at random hits trials, too."""
TRIAL_TOKENS = 8
"""New tokens after which a trial is over, and with which nobody becomes a suspect. A request that
ends its engine at some token comes to it again soon after a move, for a moved request has all
tokens that its reader was sent."""


class Suspects:
    """on_disconnect(), then charge() for each stream that is told; on_sent() for what is sent.

    Losses are counted by client's request, not by choice, and no token makes them forgotten.
    max_losses: after which a request is not sent again. max_turn_wait_s: how long a suspect waits
    in all, until it is sent, for others that are on trial; then it goes out of turn. The time in
    which nobody is on trial, because no replica is there, is none of it.
    """

    def __init__(
        self,
        max_losses: int,
        max_turn_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_losses = max_losses
        self._max_turn_wait_s = max_turn_wait_s
        self._clock = clock
        self._on_trial: RoutedStream | None = None
        self._out_of_turn: WeakSet[RoutedStream] = WeakSet()
        # Since when others are on trial, for those that were refused because of that, and how long
        # that was before.
        self._waiting_since_s: WeakKeyDictionary[RoutedStream, float] = WeakKeyDictionary()
        self._waited_s: WeakKeyDictionary[RoutedStream, float] = WeakKeyDictionary()
        self._blamed: set[Losses] = set()
        self._charged: set[Losses] = set()

    def on_disconnect(self, replica_id: str) -> None:
        """A replica is lost; its streams will be told at once, and before any other replica's."""
        self._charged.clear()
        self._blamed.clear()
        tried = self._tried()
        if tried is None or tried.replica_id != replica_id:
            return
        self._blamed.add(tried.context.losses)
        for stream in self._out_of_turn:
            if stream.replica_id == replica_id and _is_trial(stream):
                self._blamed.add(stream.context.losses)

    def charge(self, stream: RoutedStream) -> None:
        """The stream had the replica that was lost: that counts against its request, once, unless
        others were on trial there. It was a trial if it was the only suspect."""
        losses = stream.context.losses
        if self._blamed and losses not in self._blamed:
            return
        is_soon = stream.num_new_tokens < TRIAL_TOKENS
        if losses in self._charged:
            losses.is_last_soon |= is_soon
            return
        losses.is_last_soon = is_soon
        self._charged.add(losses)
        if self._blamed:  # only now is the trial over: others may have been asked since the loss
            for waiting in list(self._waiting_since_s):
                self._stop_waiting(waiting)
        losses.num_replicas += 1
        losses.num_trials += len(self._blamed) == 1

    def is_suspect(self, stream: RoutedStream) -> bool:
        return stream.num_losses >= SUSPECT_LOSSES and stream.context.losses.is_last_soon

    def has_lost_enough(self, stream: RoutedStream) -> bool:
        """Whether it must not be sent to yet another replica."""
        losses = stream.context.losses
        return losses.num_replicas >= self._max_losses or losses.num_trials >= MAX_LOST_TRIALS

    def may_go(self, stream: RoutedStream) -> bool:
        """Whether the stream may be sent to a replica now."""
        if not self.is_suspect(stream):
            return True
        is_free = self._is_free_for(stream)
        if is_free:
            self._stop_waiting(stream)
        else:
            self.begin_waiting(stream)
        return (is_free or self.is_overdue(stream)) and not self.has_lost_enough(stream)

    def begin_waiting(self, stream: RoutedStream) -> None:
        """A replica is there, and the stream lets others go first."""
        self._waiting_since_s.setdefault(stream, self._clock())

    def turn_left_s(self, stream: RoutedStream) -> float:
        """How long it may go on waiting for its turn; 0 if that is not what it waits for."""
        if stream not in self._waiting_since_s:
            return 0.0
        return max(0.0, self._max_turn_wait_s - self._turn_wait_s(stream))

    def is_overdue(self, stream: RoutedStream) -> bool:
        """Whether it has waited for others for so long that it goes out of turn."""
        return self._turn_wait_s(stream) >= self._max_turn_wait_s

    def on_sent(self, stream: RoutedStream) -> None:
        self._waiting_since_s.pop(stream, None)
        self._waited_s.pop(stream, None)
        self._out_of_turn.discard(stream)
        if not self.is_suspect(stream):
            return
        if self._is_free_for(stream):
            self._on_trial = stream
        else:
            self._out_of_turn.add(stream)

    def _stop_waiting(self, stream: RoutedStream) -> None:
        self._waited_s[stream] = self._turn_wait_s(stream)
        self._waiting_since_s.pop(stream, None)

    def _turn_wait_s(self, stream: RoutedStream) -> float:
        now_s = self._clock()
        since_s = self._waiting_since_s.get(stream, now_s)
        return self._waited_s.get(stream, 0.0) + now_s - since_s

    def _is_free_for(self, stream: RoutedStream) -> bool:
        return self._tried() in (None, stream)

    def _tried(self) -> RoutedStream | None:
        """The suspect whose trial is under way at a replica."""
        tried = self._on_trial
        return None if tried is None or not _is_trial(tried) else tried


def _is_trial(stream: RoutedStream) -> bool:
    """Of a suspect: whether a replica has it that has not proven it harmless."""
    is_there = not stream.is_ended and bool(stream.replica_id)
    return is_there and stream.num_new_tokens < TRIAL_TOKENS
