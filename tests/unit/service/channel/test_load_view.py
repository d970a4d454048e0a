"""What an ingress believes about a replica's load."""

from service.channel.load import LoadView
from service.channel.messages import ReplicaLoad
from workers.protocol import EngineStats


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def view(stall_timeout_s=10.0):
    clock = Clock()
    return LoadView(stall_timeout_s, clock), clock


def report(seen_sequence=0, **stats):
    return ReplicaLoad(EngineStats(**stats), seen_sequence, False)


def test_requests_count_until_the_report_that_includes_them():
    load, _ = view()
    load.add("a", 100, sequence=1)
    load.add("b", 50, sequence=2)
    assert (load.queued_tokens, load.num_waiting) == (150, 2)
    load.update(report(1, queued_tokens=100, num_waiting=1))
    assert (load.queued_tokens, load.num_waiting) == (150, 2)
    load.update(report(2, queued_tokens=120, running_tokens=30, num_waiting=1))
    assert (load.queued_tokens, load.num_waiting, load.total_tokens) == (120, 1, 150)


def test_a_request_that_ends_before_it_is_reported_counts_no_longer():
    load, _ = view()
    load.add("a", 100, sequence=1)
    load.remove("a")
    load.remove("a")
    assert load.queued_tokens == 0


def test_work_without_steps_is_a_stall():
    load, clock = view()
    load.update(report(num_running=1, num_steps=5))
    clock.now_s = 9
    load.update(report(num_running=1, num_steps=5))
    assert not load.is_stalled
    clock.now_s = 11
    assert load.is_stalled
    load.update(report(num_running=1, num_steps=6))
    assert not load.is_stalled


def test_idleness_is_no_stall_however_long():
    load, clock = view()
    load.update(report(num_steps=5))
    clock.now_s = 100
    load.update(report(num_steps=5))
    load.update(report(num_running=1, num_steps=5))
    assert not load.is_stalled
    clock.now_s = 109
    assert not load.is_stalled
    clock.now_s = 111
    assert load.is_stalled
