"""What a shelf keeps, for how long, and who gives way."""

import random

import pytest

from service.response_store.records import (
    BegunResponse,
    EndedResponse,
    ResponseName,
    State,
    StoreLimits,
)
from service.response_store.shelf import RUNNER_LOST_AFTER_S, ResponseShelf

LIMITS = StoreLimits(max_responses=8, max_total_bytes=20_000, max_response_bytes=8000, ttl_s=100.0)


class Clock:
    now_s = 1000.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def shelf(clock):
    return ResponseShelf(LIMITS, clock)


def name(key, tenant="t"):
    return ResponseName(tenant, key)


def ended(key, previous="", tenant="t", size=10, head=b"{}"):
    said = b'["' + key.encode() + b'"]'
    output = b'["' + b"o" * size + b'"]'
    return EndedResponse(name(key, tenant), "m", head, said, output, previous)


def begun(key, tenant="t", runner="r"):
    return BegunResponse(name(key, tenant), "m", b"begun", runner)


def inputs(parts):
    return b"".join(parts[::2]).decode()


def test_a_conversation_is_kept_as_long_as_any_response_of_it(shelf):
    assert shelf.end(ended("a"))
    assert shelf.end(ended("b", "a"))
    assert shelf.end(ended("c", "b"))
    size = shelf.num_bytes
    assert inputs(shelf.conversation(name("c"), 9999)) == '["a"]["b"]["c"]'
    assert shelf.delete(name("a"))
    assert shelf.delete(name("b"))
    assert shelf.get(name("a")) is None
    assert inputs(shelf.conversation(name("c"), 9999)) == '["a"]["b"]["c"]'
    assert shelf.num_bytes < size
    assert shelf.delete(name("c"))
    assert (shelf.num_bytes, shelf.num_responses) == (0, 0)


def test_branches_of_a_conversation_share_what_they_have_in_common(shelf):
    shelf.end(ended("a", size=4000))
    before = shelf.num_bytes
    shelf.end(ended("b", "a"))
    shelf.end(ended("c", "a"))
    assert shelf.num_bytes < before + 4000
    assert inputs(shelf.conversation(name("b"), 9999)) == '["a"]["b"]'
    assert inputs(shelf.conversation(name("c"), 9999)) == '["a"]["c"]'


def test_a_conversation_beyond_the_size_asked_for_is_not_given(shelf):
    shelf.end(ended("a", size=4000))
    assert shelf.conversation(name("a"), 3000) is None
    assert shelf.get(name("a")) is not None


def test_what_follows_something_gone_is_not_kept(shelf):
    assert not shelf.end(ended("b", "a"))
    assert shelf.num_responses == 0


def test_a_response_too_large_is_not_kept_and_what_began_it_goes(shelf):
    shelf.begin(begun("a"))
    assert not shelf.end(ended("a", size=9000))
    assert (shelf.num_responses, shelf.num_bytes) == (0, 0)


def test_responses_age(shelf, clock):
    shelf.end(ended("a"))
    clock.now_s += 60
    shelf.end(ended("b", "a"))
    clock.now_s += 60
    assert shelf.get(name("a")) is None
    assert inputs(shelf.conversation(name("b"), 9999)) == '["a"]["b"]'
    clock.now_s += 60
    assert shelf.conversation(name("b"), 9999) is None
    assert shelf.num_bytes == 0


def test_who_has_most_gives_way(shelf):
    shelf.end(ended("few", tenant="modest"))
    for number in range(20):
        shelf.end(ended(str(number), tenant="greedy"))
    assert shelf.num_responses == LIMITS.max_responses
    assert shelf.get(name("few", "modest")) is not None
    assert shelf.get(name("19", "greedy")) is not None
    for number in range(5):
        shelf.end(ended(f"large{number}", tenant="greedy", size=6000))
    assert shelf.num_bytes <= LIMITS.max_total_bytes
    assert shelf.get(name("few", "modest")) is not None


def test_many_small_responses_do_not_drive_out_a_large_one(shelf):
    shelf.end(ended("large", tenant="modest", size=6000))
    for number in range(20):
        shelf.end(ended(str(number), tenant="greedy"))
    assert shelf.get(name("large", "modest")) is not None


def test_a_cancelled_response_is_told_to_its_runner_once(shelf):
    shelf.begin(begun("a", runner="r"))
    shelf.hear("r")
    assert shelf.get(name("a")).state is State.RUNNING
    assert not shelf.cancel(name("nothing"))
    assert shelf.cancel(name("a"))
    assert shelf.get(name("a")).state is State.CANCELLING
    assert shelf.cancelled_of("other") == []
    assert shelf.cancelled_of("r") == [name("a")]
    assert shelf.cancelled_of("r") == []
    assert shelf.cancel(name("a"))
    assert shelf.cancelled_of("r") == [name("a")]
    assert shelf.end(ended("a"))
    assert shelf.get(name("a")).state is State.ENDED
    assert not shelf.cancel(name("a"))


def test_a_runner_that_falls_silent_is_lost(shelf, clock):
    shelf.begin(begun("a", runner="r"))
    clock.now_s += RUNNER_LOST_AFTER_S + 1
    assert shelf.get(name("a")).state is State.LOST
    assert not shelf.cancel(name("a"))
    shelf.hear("r")
    assert shelf.get(name("a")).state is State.RUNNING


def test_nothing_leaks_whatever_comes_and_goes(clock):
    rng = random.Random(5)
    shelf = ResponseShelf(LIMITS, clock)
    known = {}
    for step in range(4000):
        tenant = rng.choice("xyz")
        known.setdefault(tenant, [])
        key = f"{tenant}{step}"
        draw = rng.random()
        clock.now_s += rng.random() * 4
        if draw < 0.6:
            previous = rng.choice(known[tenant]) if known[tenant] and rng.random() < 0.7 else ""
            if rng.random() < 0.5:
                shelf.begin(begun(key, tenant))
            if shelf.end(ended(key, previous, tenant, size=rng.randrange(9000))):
                known[tenant].append(key)
                parts = shelf.conversation(name(key, tenant), 1 << 30)
                assert inputs(parts).endswith(f'["{key}"]')
        elif known[tenant] and draw < 0.9:
            shelf.delete(name(rng.choice(known[tenant]), tenant))
        else:
            shelf.begin(begun(key, tenant))
        assert shelf.num_responses <= LIMITS.max_responses
        assert shelf.num_bytes <= LIMITS.max_total_bytes
    clock.now_s += 200
    assert shelf.get(name("nothing")) is None
    assert (shelf.num_responses, shelf.num_bytes) == (0, 0)
    assert shelf._tenants == {}
