"""Turns and lanes without processes: who is next, who may take what, and that nobody is lost."""

import asyncio
import random

import pytest

from service.tokenizer.fair_queue import FairQueue, Flow
from service.tokenizer.lanes import Lanes, Work

MAX_SHORT = 10
SHORT, LONG = 1, 100


def work(cost, caller="anne", request="1"):
    return Work(Flow(caller, request), cost)


def popped(queue):
    items = []
    while queue:
        items.append(queue.pop())
    return items


def test_callers_share_what_their_jobs_cost():
    queue = FairQueue()
    for i in range(4):
        queue.push(Flow("big", str(i)), 4.0, "big")
    for i in range(8):
        queue.push(Flow("small", str(i)), 1.0, "small")
    assert popped(queue)[:7] == ["big", "small", "small", "small", "small", "big", "small"]


def test_requests_of_one_caller_share_too_and_keep_their_order():
    queue = FairQueue()
    for i in range(64):
        queue.push(Flow("", "batch"), 1.0, ("batch", i))
    queue.push(Flow("", "single"), 1.0, ("single", 0))
    order = popped(queue)
    assert order.index(("single", 0)) <= 1
    assert [i for name, i in order if name == "batch"] == list(range(64))


def test_a_caller_that_comes_back_does_not_begin_anew():
    queue = FairQueue()
    for i in range(3):
        queue.push(Flow("anne", str(i)), 1.0, "anne")
    queue.push(Flow("greedy", "0"), 10.0, "greedy")
    assert [queue.pop(), queue.pop()] == ["anne", "greedy"]
    queue.push(Flow("greedy", "1"), 10.0, "greedy")
    assert popped(queue) == ["anne", "anne", "greedy"]


def test_every_job_comes_out_once_whatever_the_order():
    rng = random.Random(5)
    for _ in range(50):
        queue, pushed, out = FairQueue(), 0, []
        for _ in range(200):
            if rng.random() < 0.6:
                flow = Flow(rng.choice("abc"), rng.choice("xyz"))
                queue.push(flow, rng.choice([0, 1, 50]), pushed)
                pushed += 1
            elif queue:
                out.append(queue.pop())
        assert sorted(out + popped(queue)) == list(range(pushed))
        assert not queue


@pytest.fixture
def lanes():
    lanes = Lanes(MAX_SHORT)
    lanes.add("short", is_for_short=True)
    lanes.add("any", is_for_short=False)
    return lanes


@pytest.mark.asyncio
async def test_a_long_job_never_takes_the_worker_that_is_kept_for_short_ones(lanes):
    assert await lanes.take(work(LONG)) == "any"
    waiting = asyncio.create_task(lanes.take(work(LONG)))
    await asyncio.sleep(0)
    assert await lanes.take(work(SHORT)) == "short"
    lanes.give_back("short")
    await asyncio.sleep(0)
    assert not waiting.done()
    lanes.give_back("any")
    assert await waiting == "any"


@pytest.mark.asyncio
async def test_short_jobs_use_the_other_worker_where_no_long_job_waits(lanes):
    assert [await lanes.take(work(MAX_SHORT)), await lanes.take(work(MAX_SHORT))] == [
        "short",
        "any",
    ]
    short = asyncio.create_task(lanes.take(work(SHORT)))
    long = asyncio.create_task(lanes.take(work(LONG)))
    await asyncio.sleep(0)
    lanes.give_back("any")
    assert await long == "any"
    lanes.give_back("any")
    assert await short == "any"


@pytest.mark.asyncio
@pytest.mark.parametrize("turn_comes_first", [True, False])
async def test_who_leaves_while_waiting_takes_no_worker_along(lanes, turn_comes_first):
    assert await lanes.take(work(LONG)) == "any"
    leaving = asyncio.create_task(lanes.take(work(LONG)))
    staying = asyncio.create_task(lanes.take(work(LONG)))
    await asyncio.sleep(0)
    if turn_comes_first:
        lanes.give_back("any")
        leaving.cancel()
    else:
        leaving.cancel()
        lanes.give_back("any")
    assert await asyncio.wait_for(staying, 1) == "any"
    with pytest.raises(asyncio.CancelledError):
        await leaving


@pytest.mark.asyncio
async def test_a_worker_that_is_gone_leaves_its_lane_to_the_next(lanes):
    assert await lanes.take(work(SHORT)) == "short"
    assert lanes.remove("short")
    lanes.add("new", is_for_short=True)
    assert await lanes.take(work(SHORT)) == "new"
    assert lanes.clear() == ["any"]


def test_jobs_that_nobody_wants_any_more_are_gone_and_cost_their_caller_nothing():
    queue = FairQueue()
    queue.push(Flow("anne", "0"), 1.0, "anne")
    for i in range(50):
        queue.push(Flow("anne", f"left {i}"), 100.0, i)
    queue.push(Flow("bob", "0"), 1.0, "bob 0")
    for i in range(50):
        queue.remove(Flow("anne", f"left {i}"), i)
        queue.remove(Flow("anne", f"left {i}"), i)
    for i in range(1, 4):
        queue.push(Flow("anne", str(i)), 1.0, "anne")
        queue.push(Flow("bob", str(i)), 1.0, f"bob {i}")
    assert popped(queue) == [who for i in range(4) for who in ("anne", f"bob {i}")]


def test_a_job_that_is_taken_back_forgives_nothing_that_was_handed_out():
    queue = FairQueue()
    first, unwanted = "greedy 0", "greedy 1"
    queue.push(Flow("greedy", "0"), 10.0, first)
    queue.push(Flow("greedy", "1"), 10.0, unwanted)
    queue.push(Flow("anne", "0"), 1.0, "anne")
    assert queue.pop() == first
    queue.remove(Flow("greedy", "1"), unwanted)
    queue.push(Flow("greedy", "2"), 10.0, "greedy")
    queue.push(Flow("anne", "1"), 1.0, "anne")
    assert popped(queue) == ["anne", "anne", "greedy"]


@pytest.mark.asyncio
async def test_a_caller_whose_clients_left_keeps_its_share():
    lanes = Lanes(0)
    lanes.add("worker", is_for_short=False)
    worker = await lanes.take(work(LONG, "other"))
    for i in range(50):
        waiting = asyncio.create_task(lanes.take(work(LONG, "anne", str(i))))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
    order = []

    async def run(caller, request):
        order.append((caller, await lanes.take(work(LONG, caller, request)))[0])
        lanes.give_back(worker)

    running = [
        asyncio.create_task(run(who, f"new {i}")) for i in range(8) for who in ("anne", "bob")
    ]
    await asyncio.sleep(0)
    lanes.give_back(worker)
    await asyncio.gather(*running)
    assert order == ["anne", "bob"] * 8
