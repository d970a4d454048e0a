"""Which waiting requests should wait for a prefix that another one is computing right now.

The prefix cache learns of a prompt when its prefill has been committed, and so does who keeps what
encoders made. Until then a request that begins alike, or brings the same input for the encoder,
would compute the same tokens once more. Knows requests and their tokens; no pages, no plans.
"""

from collections.abc import Sequence

import numpy as np

from workers.kv_cache.radix_node import IntArray
from workers.scheduler.request import NO_SLOT, Request
from workers.scheduler.snapshot_memory import SnapshotMemory

MIN_SAVED_TOKENS = 256
"""Waiting costs a step or two; computing fewer tokens than this costs less."""


class PrefillsUnderWay:
    """Admitted requests whose prompts the cache does not know yet."""

    def __init__(self, page_size: int, states: Sequence[SnapshotMemory]) -> None:
        self._page_size = page_size
        self._states = states
        self._requests: list[Request] = []

    def add(self, request: Request) -> None:
        self._requests.append(request)

    def drop_finished(self) -> list[Request]:
        """Forget, and return, those that are committed, ended or back in the queue."""
        finished = [request for request in self._requests if not _is_under_way(request)]
        if finished:
            self._requests = [request for request in self._requests if _is_under_way(request)]
        return finished

    def find(
        self, request: Request, num_cached_tokens: int, num_encoder_tokens: int
    ) -> Request | None:
        """One that is computing enough of request's tokens beyond the cached ones, its encoder's
        included. num_encoder_tokens: those that nobody has computed yet."""
        if request.needs_whole_prompt:
            return None
        most = request.num_tokens - 1
        if most - num_cached_tokens + num_encoder_tokens < MIN_SAVED_TOKENS:
            return None
        for other in self._requests:
            if other.cache_salt == request.cache_salt:
                # Equal salts are equal inputs: see EncoderRead.key.
                num_known = num_cached_tokens - num_encoder_tokens
                num_shared = self._num_shared(request, other)
                if num_shared - num_known < MIN_SAVED_TOKENS:
                    continue
                for states in self._states:
                    num_shared = states.resume_length(other, num_shared)
                if num_shared - num_known >= MIN_SAVED_TOKENS:
                    return other
        return None

    def look_ahead(self, request: Request) -> None:
        """The request will come to find() later: let those under way save states where it parts."""
        if self._states:
            self.find(request, 0, 0)

    def _num_shared(self, request: Request, other: Request) -> int:
        """Tokens in whole pages with which both begin; the last token is always computed."""
        mine, theirs = (
            request.cache_keys(request.num_tokens - 1),
            other.cache_keys(other.prefill_len),
        )
        page_size = self._page_size
        if not np.array_equal(mine[:page_size], theirs[:page_size]):
            return 0
        return common_length(mine, theirs) // page_size * page_size


def common_length(first: IntArray, second: IntArray) -> int:
    """With how many equal tokens both begin."""
    n = min(len(first), len(second))
    is_equal = first[:n] == second[:n]
    return n if is_equal.all() else int(np.argmin(is_equal))


def _is_under_way(request: Request) -> bool:
    is_running = request.slot != NO_SLOT and not request.is_ended
    return is_running and request.num_vouched_tokens < request.prefill_len
