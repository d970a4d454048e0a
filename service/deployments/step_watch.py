"""Notices an engine that hangs inside a step, by the heartbeat of its loop.

A thread beside the engine's. It needs no controller and no request, so it works while Serve's
controller is down and never waits behind the engine it watches. A process that is stopped, or whose
interpreter lock is held by the hung step, cannot run this thread: its ingresses miss its heartbeats
instead, and Serve's health check or SilenceWatch has it killed. Knows no Ray and no channel.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

from workers.errors import EngineFailedError

LOOKS_PER_TIMEOUT = 10
MAX_LOOK_INTERVAL_S = 1.0


class Beating(Protocol):
    """An engine loop, as far as its heartbeat goes."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def last_beat_s(self) -> float:
        """time.monotonic() of the loop's last turn."""


def ailment(
    engine: Beating, step_timeout_s: float, clock: Callable[[], float] = time.monotonic
) -> str | None:
    """What is wrong with the engine's loop, None if it turns. clock: the one of its beats."""
    if not engine.is_alive:
        return "the engine's thread has ended"
    silence_s = clock() - engine.last_beat_s
    if silence_s > step_timeout_s:
        return f"the engine has finished no step for {silence_s:.0f} s"
    return None


class StepWatch:
    """start() and stop(). on_hung is called at most once, on the watch's thread.

    It comes between step_timeout_s and a tenth more after the last turn (at most a second more). An
    engine whose loop has ended tells so itself.
    """

    def __init__(
        self,
        engine: Beating,
        step_timeout_s: float,
        on_hung: Callable[[EngineFailedError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._step_timeout_s = step_timeout_s
        self._on_hung = on_hung
        self._clock = clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tessera-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the watch; returns at once."""
        self._stopping.set()

    def _run(self) -> None:
        interval_s = min(MAX_LOOK_INTERVAL_S, self._step_timeout_s / LOOKS_PER_TIMEOUT)
        while not self._stopping.wait(interval_s):
            found = ailment(self._engine, self._step_timeout_s, self._clock)
            if found is not None:
                if self._engine.is_alive:
                    self._on_hung(EngineFailedError(found))
                return
