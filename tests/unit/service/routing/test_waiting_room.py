"""The one waiting room: who is tried in which order, and how each wait ends exactly once."""

import asyncio
import time
from dataclasses import dataclass

import pytest

from service.autoscaling.settings import WaitingSettings
from service.errors import ApiError, ApiErrorCode
from service.routing.waiting_room import WaitingRoom

pytestmark = pytest.mark.asyncio

LATE = ApiError(ApiErrorCode.REPLICA_LOST, "too late")
NOBODY = ApiError(ApiErrorCode.UNAVAILABLE, "nobody")


@dataclass(eq=False)
class Stream:
    """What the room asks of a stream."""

    name: str
    has_output: bool = False
    num_tokens: int = 10
    num_losses: int = 0


class Room:
    """A room and what it did."""

    def __init__(self, **settings):
        self.free = 0
        self.tried = []
        self.left_s = []
        self.arrivals = 0
        self.room = WaitingRoom(
            WaitingSettings(**settings), self.route, self.on_arrival, self.left_s.append
        )

    def on_arrival(self):
        self.arrivals += 1

    def route(self, stream):
        self.tried.append(stream.name)
        if not self.free:
            raise NOBODY
        self.free -= 1

    def hold(self, stream, wait_s=10.0):
        told = []
        self.room.hold(stream, wait_s, LATE, told.append)
        return told


async def test_whoever_has_been_read_is_tried_first_then_who_came_first():
    made = Room()
    told = {
        stream.name: made.hold(stream)
        for stream in (
            Stream("new 1"),
            Stream("read 1", True),
            Stream("new 2"),
            Stream("read 2", True),
        )
    }
    made.free = 3
    made.room.on_change()
    assert made.tried == ["read 1", "read 2", "new 1", "new 2"]
    assert told == {"new 1": [None], "read 1": [None], "new 2": [], "read 2": [None]}
    assert made.room.num_requests == 1
    made.room.close(NOBODY)


async def test_who_comes_into_the_empty_room_is_announced():
    made = Room()
    first = Stream("first")
    made.hold(first)
    made.hold(Stream("second"))
    assert made.arrivals == 1
    assert (made.room.num_requests, made.room.num_tokens) == (2, 20)
    made.room.dismiss(NOBODY)
    made.hold(first)
    assert made.arrivals == 2
    made.room.dismiss(NOBODY)


async def test_when_the_time_is_up_there_is_one_last_try():
    made = Room()
    told = made.hold(Stream("lucky"), wait_s=0.01)
    made.free = 1  # and no change is told
    await asyncio.sleep(0.05)
    assert told == [None]
    told = made.hold(Stream("unlucky"), wait_s=0.01)
    await asyncio.sleep(0.05)
    assert told == [LATE]
    assert made.tried == ["lucky", "unlucky"]
    assert made.room.num_requests == 0


async def test_who_left_is_neither_tried_nor_told():
    made = Room()
    stream = Stream("gone")
    told = made.hold(stream, wait_s=0.01)
    made.room.leave(stream)
    made.room.leave(stream)
    made.free = 1
    made.room.on_change()
    made.room.dismiss(NOBODY)
    await asyncio.sleep(0.05)
    assert made.tried == told == []


async def test_a_dismissal_is_told_once_and_a_closed_room_stays_closed():
    made = Room()
    told = made.hold(Stream("a"), wait_s=0.01)
    assert not made.room.is_closed
    made.room.close(NOBODY)
    made.room.dismiss(LATE)
    await asyncio.sleep(0.05)
    assert told == [NOBODY]
    assert made.room.is_closed


async def test_a_new_request_waits_at_most_its_time_and_every_wait_is_measured():
    made = Room(wait_s=0.02, retry_after_s=9.0)
    with pytest.raises(ApiError) as caught:
        await made.room.wait(Stream("late"))
    assert (caught.value.code, caught.value.retry_after_s) == (ApiErrorCode.UNAVAILABLE, 9.0)
    made.free = 1
    began_s = time.monotonic()
    waiting = asyncio.create_task(made.room.wait(Stream("served")))
    await asyncio.sleep(0)
    made.room.on_change()
    await waiting
    assert len(made.left_s) == 2
    assert made.left_s[0] >= 0.02
    assert 0.0 <= made.left_s[1] <= time.monotonic() - began_s
    assert made.room.num_requests == 0


async def test_moved_streams_fill_the_room_but_are_never_turned_away():
    made = Room(max_requests=2, max_tokens=35)
    for number in range(3):
        made.hold(Stream(f"moved {number}", True))
    with pytest.raises(ApiError) as caught:
        await made.room.wait(Stream("new"))
    assert caught.value.code is ApiErrorCode.OVERLOADED
    made.room.dismiss(NOBODY)
    made.hold(Stream("moved", True, num_tokens=30))
    with pytest.raises(ApiError) as caught:
        await made.room.wait(Stream("new"))
    assert caught.value.code is ApiErrorCode.OVERLOADED
    made.room.dismiss(NOBODY)


async def test_a_new_request_whose_replica_is_lost_at_once_is_not_forgotten():
    """It is held anew before whoever waited for its first replica has had a turn."""
    made = Room()
    stream = Stream("new")
    waiting = asyncio.create_task(made.room.wait(stream))
    await asyncio.sleep(0)
    made.free = 1
    made.room.on_change()
    told = made.hold(stream, 0.05)
    await waiting
    assert made.room.num_requests == 1
    await asyncio.sleep(0.2)
    assert told == [LATE]


async def test_those_with_most_lost_replicas_are_tried_last_of_those_that_are_read():
    made = Room()
    for stream in (
        Stream("thrice", True, num_losses=3),
        Stream("new"),
        Stream("twice", True, num_losses=2),
        Stream("once", True, num_losses=1),
    ):
        made.hold(stream)
    made.room.on_change()
    assert made.tried == ["once", "twice", "thrice", "new"]
    made.room.dismiss(NOBODY)
