"""Adapters in one rank's host memory: a fixed number, those without a live request by turns.

Any thread may call it. Rank 0 reads beside the steps, for requests that wait; other ranks read when
a step first needs an adapter, from files that rank 0 has just brought into the node's memory.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from workers.adapters.host import HostAdapter
from workers.adapters.ref import AdapterRef
from workers.errors import ErrorCode, RequestRejectedError

NUM_READ_THREADS = 2

ReadAdapter = Callable[[AdapterRef], HostAdapter]


class AdapterStore:
    """max_adapters: that are kept. read: raises AdapterError."""

    def __init__(self, read: ReadAdapter, max_adapters: int) -> None:
        self._read = read
        self._max_adapters = max_adapters
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(NUM_READ_THREADS, thread_name_prefix="tessera-adapter")
        # By key, the one used last at the end.
        self._kept: OrderedDict[str, Future[HostAdapter]] = OrderedDict()
        self._num_live: dict[str, int] = {}

    def pin(self, ref: AdapterRef) -> Future[HostAdapter]:
        """One more live request has this adapter. It is being read, or has been.

        Raises RequestRejectedError where live requests have as many others as there is room for.
        """
        with self._lock:
            if ref.key not in self._kept and not self._make_room():
                raise RequestRejectedError(
                    ErrorCode.QUEUE_FULL,
                    f"requests at hand have {len(self._num_live)} adapters, and the engine keeps "
                    f"{self._max_adapters} at a time (max_cpu_loras)",
                    "model",
                )
            self._num_live[ref.key] = self._num_live.get(ref.key, 0) + 1
            return self._begin(ref)

    def unpin(self, ref: AdapterRef) -> None:
        """A live request that has pinned it has ended."""
        with self._lock:
            self._num_live[ref.key] -= 1
            if self._num_live[ref.key]:
                return
            del self._num_live[ref.key]
            if _has_failed(self._kept[ref.key]):
                # Whoever comes next looks again.
                del self._kept[ref.key]

    def get(self, ref: AdapterRef) -> HostAdapter:
        """Waits until it has been read. Raises AdapterError."""
        with self._lock:
            if ref.key not in self._kept:
                self._make_room()
            future = self._begin(ref)
        return future.result()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _begin(self, ref: AdapterRef) -> Future[HostAdapter]:
        if ref.key not in self._kept:
            self._kept[ref.key] = self._pool.submit(self._read, ref)
        self._kept.move_to_end(ref.key)
        return self._kept[ref.key]

    def _make_room(self) -> bool:
        """Whether there is room for one more."""
        idle = [key for key in self._kept if key not in self._num_live]
        num_over = len(self._kept) + 1 - self._max_adapters
        for key in idle[: max(0, num_over)]:
            del self._kept[key]
        return len(self._kept) < self._max_adapters


def _has_failed(future: Future[HostAdapter]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
