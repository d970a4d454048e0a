"""Where the device's clock puts steps on the host's axis."""

import pytest

from workers.runner.cuda_executor import DeviceClock, StepEvents


class EventAt:
    """A device event at so many milliseconds of the device's own clock."""

    def __init__(self, at_ms):
        self.at_ms = at_ms

    def synchronize(self):
        """Long past."""

    def elapsed_time(self, end_event):
        return end_event.at_ms - self.at_ms


def events(start_ms, end_ms, **more):
    return StepEvents(EventAt(start_ms), EventAt(end_ms), **more)


class HostClock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def host():
    return HostClock()


def test_steps_follow_each_other_by_the_devices_clock_however_late_the_host_looks(host) -> None:
    clock = DeviceClock(host)
    host.now_s = 100.010
    assert clock.place(events(0, 10), host.now_s) == pytest.approx((100.0, 100.010))
    host.now_s = 100.9
    assert clock.place(events(12, 20), host.now_s) == pytest.approx((100.012, 100.020))


def test_no_step_ends_after_the_host_has_seen_its_end(host) -> None:
    """The first look came 5 ms late: the next step corrects the axis."""
    clock = DeviceClock(host)
    host.now_s = 100.015
    clock.place(events(0, 10), host.now_s)
    host.now_s = 100.020
    assert clock.place(events(10, 20), host.now_s) == pytest.approx((100.010, 100.020))


def test_a_graph_begins_when_the_host_has_handed_it_over(host) -> None:
    """Its first event is passed by an idle device while the host still prepares the launch."""
    clock = DeviceClock(host)
    host.now_s = 100.010
    clock.place(events(0, 10), host.now_s)
    host.now_s = 100.020
    started_s, finished_s = clock.place(events(10, 20, submitted_s=100.013), host.now_s)
    assert (started_s, finished_s) == pytest.approx((100.013, 100.020))
    host.now_s = 100.030
    assert clock.place(events(20, 30, submitted_s=100.015), host.now_s)[0] == pytest.approx(100.020)


def test_after_a_pause_the_hosts_clock_is_taken_anew(host) -> None:
    clock = DeviceClock(host)
    host.now_s = 100.010
    clock.place(events(0, 10), host.now_s)
    host.now_s = 107.5
    assert clock.place(events(5000, 5010), host.now_s) == pytest.approx((107.490, 107.5))
