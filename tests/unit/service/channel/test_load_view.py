"""What an ingress believes about a replica's load."""

from service.channel.load import LoadView
from service.channel.messages import ReplicaLoad
from workers.engine.protocol import EngineStats


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def view(stall_timeout_s=10.0):
    clock = Clock()
    return LoadView(stall_timeout_s, clock), clock


def report(seen_sequence=0, **stats):
    return ReplicaLoad(EngineStats(**stats), seen_sequence, False)


def test_it_tells_what_the_last_report_says_and_forgets_it_with_the_connection():
    load, _ = view()
    load.update(report(2, queued_tokens=120, running_tokens=30, num_waiting=1))
    assert (load.queued_tokens, load.running_tokens, load.num_waiting) == (120, 30, 1)
    assert load.seen_sequence == 2
    load.update(ReplicaLoad(EngineStats(), 3, is_draining=True))
    assert load.is_draining
    load.clear()
    assert (load.queued_tokens, load.seen_sequence, load.is_draining) == (0, 0, False)


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


def test_requests_that_wait_without_any_running_are_work():
    load, clock = view()
    load.update(report(num_waiting=2, num_steps=5))
    clock.now_s = 9
    load.update(report(num_waiting=2, num_steps=5))
    clock.now_s = 10
    assert not load.is_stalled
    clock.now_s = 11
    assert load.is_stalled


def test_it_tells_what_the_replica_has_written_and_evicted_and_forgets_that_too():
    load, _ = view()
    load.update(report(num_prompt_tokens=60, num_output_tokens=10, evicted_ordinary=20))
    assert (load.written_tokens, load.evicted_ordinary, load.evicted_shared) == (70, 20, -1)
    load.clear()
    assert (load.written_tokens, load.evicted_ordinary, load.evicted_shared) == (0, -1, -1)
