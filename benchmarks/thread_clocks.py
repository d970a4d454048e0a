"""Processor time of native threads, which Python's own clocks do not tell, and how long a thread of
Python's waits for the interpreter."""

import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

Made = TypeVar("Made")

_THREAD_CLOCK = 6
"""Linux: of one thread, what the scheduler counts."""


def cpu_s(thread_id: int) -> float:
    """Of a thread of this process, by the kernel's id."""
    return time.clock_gettime((~thread_id << 3) | _THREAD_CLOCK)


def thread_ids() -> set[int]:
    return {int(name) for name in os.listdir("/proc/self/task")}


def with_threads(make: Callable[[], Made]) -> tuple[Made, list[int]]:
    """What make gives, and the threads that it has started."""
    before = thread_ids()
    made = make()
    return made, sorted(thread_ids() - before)


class InterpreterProbe:
    """Sleeps again and again: how much later than asked it runs Python is the machine's timers and
    the wait for the interpreter. Compare to a quiet process."""

    def __init__(self, sleep_s: float = 0.001) -> None:
        self.late_s: list[float] = []
        self._sleep_s = sleep_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "InterpreterProbe":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            start_s = time.perf_counter()
            time.sleep(self._sleep_s)
            self.late_s.append(time.perf_counter() - start_s - self._sleep_s)
