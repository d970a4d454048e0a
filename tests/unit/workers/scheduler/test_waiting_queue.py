"""WaitingQueue: by priority, then by arrival, whatever is removed in between."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.workers.scheduler.driver import make_config, make_request
from workers.scheduler.ledger import Ledger
from workers.scheduler.request import Request
from workers.scheduler.submission import Submission
from workers.scheduler.waiting_queue import WaitingQueue


def make_requests(priorities: list[int]) -> list[Request]:
    submission = Submission(make_config(), WaitingQueue(), Ledger())
    return [
        submission.accept(make_request(f"r{i}", [3] * (i + 1), priority=priority), now_s=0.0)
        for i, priority in enumerate(priorities)
    ]


@given(st.lists(st.integers(-2, 2), min_size=1, max_size=20), st.randoms())
def test_order_is_priority_then_arrival_and_tokens_are_counted(priorities, random):
    requests = make_requests(priorities)
    shuffled = random.sample(requests, len(requests))
    queue = WaitingQueue()
    for request in shuffled:
        queue.push(request)
    for request in shuffled[::3]:
        queue.remove(request)
    left = [request for request in requests if request not in shuffled[::3]]
    assert queue.num_tokens == sum(request.num_tokens for request in left)
    in_order = list(queue)
    assert in_order == sorted(left, key=lambda r: (r.priority, r.arrival))
    for request in in_order:
        assert queue.peek() is request
        queue.remove(request)
    assert queue.num_tokens == 0
    assert queue.peek() is None


def test_removing_what_does_not_wait_is_an_error():
    first, second = make_requests([0, 0])
    queue = WaitingQueue()
    queue.push(first)
    with pytest.raises(ValueError, match="is not waiting"):
        queue.remove(second)


@given(st.lists(st.integers(-2, 2), min_size=3, max_size=20), st.randoms())
def test_parked_requests_are_in_nobodys_way_and_come_back_to_their_places(priorities, random):
    first, second, *requests = make_requests(priorities)
    queue = WaitingQueue()
    for request in requests:
        queue.push(request)
    parked = random.sample(requests, len(requests) // 2)
    for request in parked:
        queue.park(request, until=random.choice([first, second]))
    num_tokens = sum(request.num_tokens for request in requests)
    assert (len(queue), queue.num_tokens) == (len(requests), num_tokens)
    assert sorted(queue, key=lambda r: r.arrival) == requests
    assert queue.peek() not in parked
    gone = parked[::2]
    for request in gone:
        queue.remove(request)
    for until in (first, second, second):
        queue.release_parked(until)
    left = [request for request in requests if request not in gone]
    assert list(queue) == sorted(left, key=lambda r: (r.priority, r.arrival))
    assert (len(queue), queue.num_tokens) == (len(left), sum(r.num_tokens for r in left))


def test_parking_twice_and_removing_twice_are_errors():
    first, second = make_requests([0, 0])
    queue = WaitingQueue()
    queue.push(first)
    queue.park(first, until=second)
    with pytest.raises(ValueError, match="not in the queue's order"):
        queue.park(first, until=second)
    queue.remove(first)
    with pytest.raises(ValueError, match="is not waiting"):
        queue.remove(first)
    queue.release_parked(second)
    assert (len(queue), queue.peek()) == (0, None)
