"""StepWatch: a heartbeat that stops is noticed in time, one that beats never."""

import threading
import time

import pytest

from service.deployments.step_watch import StepWatch, ailment


class Loop:
    """A heart that beats when told to."""

    def __init__(self):
        self.is_alive = True
        self.last_beat_s = time.monotonic()


class Watched:
    """A watch with what it told."""

    def __init__(self, step_timeout_s):
        self.loop = Loop()
        self.failures = []
        self.is_told = threading.Event()
        self.watch = StepWatch(self.loop, step_timeout_s, self.tell)

    def tell(self, failure):
        self.failures.append(failure)
        self.is_told.set()


def test_silence_is_told_once_within_a_tenth_more_than_the_timeout():
    watched = Watched(step_timeout_s=0.5)
    started_s = time.monotonic()
    watched.watch.start()
    assert watched.is_told.wait(5)
    assert 0.5 < time.monotonic() - started_s < 1.0
    time.sleep(0.2)
    (failure,) = watched.failures
    assert "no step" in str(failure)


def test_a_loop_that_turns_is_left_alone():
    """For longer than the timeout, with beats much closer than it: a busy machine delays them."""
    watched = Watched(step_timeout_s=1.0)
    watched.watch.start()
    for _ in range(24):
        time.sleep(0.05)
        watched.loop.last_beat_s = time.monotonic()
    assert watched.failures == []
    watched.watch.stop()


def test_a_loop_that_has_ended_tells_so_itself():
    watched = Watched(step_timeout_s=0.1)
    watched.loop.is_alive = False
    watched.watch.start()
    assert not watched.is_told.wait(0.4)
    assert ailment(watched.loop, 0.1) == "the engine's thread has ended"


def test_a_stopped_watch_tells_nothing():
    watched = Watched(step_timeout_s=0.1)
    watched.watch.start()
    watched.watch.stop()
    assert not watched.is_told.wait(0.4)


@pytest.mark.parametrize(("silence_s", "is_ill"), [(0.0, False), (59.0, False), (61.0, True)])
def test_the_health_check_uses_the_same_limit(silence_s, is_ill):
    loop = Loop()
    loop.last_beat_s -= silence_s
    assert (ailment(loop, 60.0) is not None) is is_ill
