"""How far a download is, taken from the bars that the hub library would draw."""

import io
import math
import threading
import time
from collections.abc import Callable
from typing import Any

from tqdm.std import tqdm

OnBytes = Callable[[int, int], None]
REPORT_INTERVAL_S = 0.5


def no_progress(bytes_done: int, bytes_total: int) -> None:
    """Nobody watches."""


def make_counter(total_bytes: int, on_bytes: OnBytes) -> type[tqdm]:
    """A class of bars that draw nothing and report the bytes of the furthest of them.

    The library counts what it transfers and what it writes in two bars of one class.
    """

    class Counter(tqdm):  # type: ignore[misc]
        monitor_interval = 0  # no thread that looks after drawing

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            kwargs.update(disable=False, file=io.StringIO())
            self._counts_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **kwargs)

        def display(self, *args: Any, **kwargs: Any) -> bool:
            return True

        def update(self, n: float | None = 1) -> bool | None:
            drawn: bool | None = super().update(n)
            if self._counts_bytes and total_bytes:
                on_bytes(min(int(self.n), total_bytes), total_bytes)
            return drawn

    return Counter


class SteadyProgress:
    """Passes on what grew, at most once in interval_s, and the end always. For any threads."""

    def __init__(
        self,
        on_bytes: OnBytes,
        clock: Callable[[], float] = time.monotonic,
        interval_s: float = REPORT_INTERVAL_S,
    ) -> None:
        self._on_bytes = on_bytes
        self._clock = clock
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._told_s = -math.inf
        self._done = 0

    def __call__(self, bytes_done: int, bytes_total: int) -> None:
        with self._lock:
            if bytes_done <= self._done:
                return
            now_s = self._clock()
            if bytes_done < bytes_total and now_s - self._told_s < self._interval_s:
                return
            self._told_s, self._done = now_s, bytes_done
            self._on_bytes(bytes_done, bytes_total)
