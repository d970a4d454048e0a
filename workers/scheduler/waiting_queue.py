"""Requests that wait for a slot, in the order in which they will be admitted."""

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain

from workers.scheduler.request import Request, SortKey


def _sort_key(request: Request) -> SortKey:
    return request.sort_key


class WaitingQueue:
    """Ordered by (priority, resumed ones first, arrival).

    A retracted request keeps its arrival, so that it comes back in front of those that never ran.
    So does one that began at another engine. A parked request waits for what another one computes
    or has: it is out of everybody's way until that one is done, and then has its place again.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        # By the id() of what they wait for; requests are compared by identity.
        self._parked: dict[int, list[Request]] = {}
        self._num_parked = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        """Parked ones included, as in all totals."""
        return len(self._requests) + self._num_parked

    def __iter__(self) -> Iterator[Request]:
        return chain(self._requests, *self._parked.values())

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting requests will have to bring into the pool, cached or not, and of
        their encoders."""
        return self._num_tokens

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=_sort_key)
        self._num_tokens += request.num_queued_tokens

    def peek(self) -> Request | None:
        """The first of those that are not parked."""
        return self._requests[0] if self._requests else None

    def remove(self, request: Request) -> None:
        """Raises ValueError when the request does not wait."""
        if not self._remove_queued(request) and not self._remove_parked(request):
            raise ValueError(f"request {request.request_id} is not waiting")
        self._num_tokens -= request.num_queued_tokens

    def park(self, request: Request, until: object) -> None:
        """Take a request out of the order until release_parked(until), whatever that is.

        Raises ValueError when it does not wait in the order.
        """
        if not self._remove_queued(request):
            raise ValueError(f"request {request.request_id} is not in the queue's order")
        self._parked.setdefault(id(until), []).append(request)
        self._num_parked += 1

    def release_parked(self, until: object) -> None:
        """Put back into the order whoever waits for this."""
        for request in self._parked.pop(id(until), ()):
            insort(self._requests, request, key=_sort_key)
            self._num_parked -= 1

    def _remove_queued(self, request: Request) -> bool:
        index = bisect_left(self._requests, request.sort_key, key=_sort_key)
        if index == len(self._requests) or self._requests[index] is not request:
            return False
        del self._requests[index]
        return True

    def _remove_parked(self, request: Request) -> bool:
        for until, requests in self._parked.items():
            if request in requests:
                requests.remove(request)
                self._num_parked -= 1
                if not requests:
                    del self._parked[until]
                return True
        return False
