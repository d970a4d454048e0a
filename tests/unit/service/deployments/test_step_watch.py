"""StepWatch: a heartbeat that stops is noticed in time, one that beats never."""

import threading
import time

import pytest

from service.deployments.step_watch import StepWatch, ailment

TIMEOUT_S = 5.0
# Ten times the timeout: a watch that has told nothing by then never does.
END_S = 50.0


class Loop:
    """A heart that beats when told to."""

    def __init__(self, last_beat_s=0.0):
        self.is_alive = True
        self.last_beat_s = last_beat_s


class Passing:
    """A clock, and the event that the watch waits for: a wait takes its time on this clock only."""

    def __init__(self, on_wait):
        self.now_s = 0.0
        self._on_wait = on_wait

    def __call__(self):
        return self.now_s

    def wait(self, timeout_s):
        self.now_s += timeout_s
        self._on_wait(self.now_s)
        return self.now_s > END_S


def told(loop, on_wait=lambda now_s: None):
    """When the watch told what, by a clock of its own, on this thread."""
    clock, failures = Passing(on_wait), []
    watch = StepWatch(loop, TIMEOUT_S, lambda error: failures.append((clock(), str(error))), clock)
    watch._stopping = clock
    watch._run()
    return failures


def test_silence_is_told_once_within_a_tenth_more_than_the_timeout():
    ((told_s, failure),) = told(Loop())
    assert TIMEOUT_S < told_s <= 1.1 * TIMEOUT_S + 1e-6
    assert "no step" in failure


def test_a_loop_that_turns_is_left_alone():
    """For much longer than the timeout; each beat is looked at just before it is too late."""
    loop = Loop()

    def beat(now_s):
        if now_s - loop.last_beat_s > 0.95 * TIMEOUT_S:
            loop.last_beat_s = now_s

    assert told(loop, beat) == []
    assert loop.last_beat_s > END_S - TIMEOUT_S


def test_a_loop_that_has_ended_tells_so_itself():
    loop = Loop()
    loop.is_alive = False
    assert told(loop) == []
    assert ailment(loop, TIMEOUT_S) == "the engine's thread has ended"


def test_a_watch_has_a_thread_of_its_own_and_tells_there():
    is_told, threads = threading.Event(), []

    def tell(failure):
        threads.append(threading.current_thread())
        is_told.set()

    StepWatch(Loop(time.monotonic() - 60.0), 0.1, tell).start()
    assert is_told.wait(60)
    (thread,) = threads
    assert thread is not threading.current_thread()
    thread.join(60)
    assert len(threads) == 1


def test_a_stopped_watch_ends_and_tells_nothing():
    failures = []
    watch = StepWatch(Loop(time.monotonic()), 600.0, failures.append)
    watch.start()
    watch.stop()
    watch._thread.join(60)
    assert not watch._thread.is_alive()
    assert failures == []


@pytest.mark.parametrize(("silence_s", "is_ill"), [(0.0, False), (59.0, False), (61.0, True)])
def test_the_health_check_uses_the_same_limit(silence_s, is_ill):
    assert (ailment(Loop(100.0 - silence_s), 60.0, lambda: 100.0) is not None) is is_ill
