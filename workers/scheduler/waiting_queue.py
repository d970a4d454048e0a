"""Requests that wait for a slot, in the order in which they will be admitted."""

from bisect import bisect_left, insort
from collections.abc import Iterator

from workers.scheduler.request import Request


def _sort_key(request: Request) -> tuple[int, int]:
    return request.sort_key


class WaitingQueue:
    """Ordered by (priority, arrival).

    A retracted request keeps its arrival, and requests of equal priority are admitted by arrival,
    so that it comes back in front of those that never ran.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def num_tokens(self) -> int:
        """Tokens that the waiting requests will have to bring into the pool, cached or not."""
        return self._num_tokens

    def push(self, request: Request) -> None:
        insort(self._requests, request, key=_sort_key)
        self._num_tokens += request.num_tokens

    def peek(self, index: int = 0) -> Request | None:
        """The request that has index others before it."""
        return self._requests[index] if index < len(self._requests) else None

    def remove(self, request: Request) -> None:
        """Raises ValueError when the request does not wait."""
        index = bisect_left(self._requests, request.sort_key, key=_sort_key)
        if index == len(self._requests) or self._requests[index] is not request:
            raise ValueError(f"request {request.request_id} is not waiting")
        del self._requests[index]
        self._num_tokens -= request.num_tokens
