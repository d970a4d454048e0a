"""Which requests go to other replicas though theirs could go on with them.

Those of replicas that drain, a few at a time, and a share of those that wait when another replica
has come. Knows no links.
"""

from collections.abc import Callable, Iterable
from heapq import nlargest

from service.routing.routed_stream import RoutedStream


class Handover:
    """Until its turn comes a request goes on at its draining replica, so that its reader waits for
    one prompt to be computed at the new one and not for those of all others that move.

    max_streams: on their way at once. move: sends a stream to another replica and aborts it at
    its own; False if none takes it now, then nothing has changed."""

    def __init__(self, max_streams: int, move: Callable[[RoutedStream], bool]) -> None:
        self._max_streams = max_streams
        self._move = move
        self._on_their_way: set[RoutedStream] = set()

    def advance(self, leaving: Iterable[RoutedStream]) -> None:
        """leaving: all streams of draining replicas. Those go first that would stay longest."""
        num_free = self._max_streams - len(self._on_their_way)
        for stream in nlargest(num_free, leaving, key=_stay_tokens):
            if not self._move(stream):
                return
            self._on_their_way.add(stream)

    def on_arrived(self, stream: RoutedStream) -> bool:
        """The stream is answered by its new replica, waits for yet another one, or has ended.

        Whether it was on its way: then the next may go.
        """
        if stream not in self._on_their_way:
            return False
        self._on_their_way.remove(stream)
        return True


def share_of_waiting(
    unanswered: Iterable[RoutedStream], num_waiting: int, num_replicas: int
) -> list[RoutedStream]:
    """Of one replica's requests, those that one that has just come is to take over.

    unanswered: by the replica. num_waiting: that it has not begun, by its report; these came last.
    num_replicas: those that share from now on, the new one included.
    """
    newest = sorted(unanswered, key=lambda stream: stream.sent_s, reverse=True)[:num_waiting]
    return newest[: len(newest) // num_replicas]


def _stay_tokens(stream: RoutedStream) -> float:
    left = stream.max_tokens_left
    return float("inf") if left is None else left
