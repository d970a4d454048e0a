"""A request that ends every engine which it runs in: how many it takes, and who outlives it."""

import asyncio
import contextlib
import time

import pytest

from service.errors import ApiErrorCode
from service.routing import router
from service.routing.policy import RouterSettings
from service.routing.suspects import TRIAL_TOKENS
from tests.fakes.replica import FakeReplica, eventually
from tests.unit.service.routing.router.test_moved_streams import (
    SLOW_CHANNEL,
    KeepingEngine,
    is_clean,
    read_to_error,
    record_reports,
)
from tests.unit.service.routing.router.test_router import anyone, collect, request, routed, tokens

pytestmark = pytest.mark.asyncio

POISON = 13
NUM_TOKENS = 300
WAIT_S = 60.0


class Mortal(KeepingEngine):
    """Fails when a request whose prompt is POISON has run in it for so many steps."""

    def __init__(self, num_steps):
        super().__init__(step_s=0.002)
        self.poisoned_steps = num_steps
        self.is_dead = False

    def submit(self, request):
        super().submit(request)
        if request.prompt_token_ids == [POISON] and self.fail_after_steps is None:
            self.fail_after_steps = self.num_steps + self.poisoned_steps


def mortal(name, num_steps):
    replica = FakeReplica(Mortal(num_steps), SLOW_CHANNEL, name)

    def die(_):
        replica.engine.is_dead = True
        replica.server.close(0.0)

    # A replica whose engine fails closes its channel and leaves.
    replica.loop._on_failure = die
    return replica


@contextlib.asynccontextmanager
async def mortals(num_replicas, num_steps, **settings):
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(mortal(str(i), num_steps)) for i in range(num_replicas)]
        async with routed(*replicas, settings=RouterSettings(**settings)) as r:
            yield r, replicas


def num_dead(replicas):
    return sum(replica.engine.is_dead for replica in replicas)


def innocent(r, number):
    return r.router.submit(request(f"r{number}", [100 + number], NUM_TOKENS), anyone())


def expected(number):
    return [101 + number + i for i in range(NUM_TOKENS)]


def poison(r, context=None, name="poison"):
    return r.router.submit(request(name, [POISON], NUM_TOKENS), context or anyone())


@pytest.mark.parametrize("num_steps", [0, 1, 2, 5])
async def test_what_ends_an_engine_soon_takes_four_replicas_and_no_stream_of_others(num_steps):
    async with mortals(7, num_steps) as (r, replicas):
        others = [await innocent(r, i) for i in range(20)]
        received = [tokens([await anext(stream)]) for stream in others]
        _, error = await read_to_error(await poison(r))
        assert error.code is ApiErrorCode.REPLICA_LOST
        assert num_dead(replicas) == 4
        for number, stream in enumerate(others):
            assert received[number] + tokens(await collect(stream)) == expected(number)
        assert num_dead(replicas) == 4
        assert is_clean(r)


async def test_what_ends_an_engine_late_takes_as_many_replicas_as_the_setting_says():
    async with mortals(6, 40, max_losses=5) as (r, replicas):
        received, error = await read_to_error(await poison(r))
        assert error.code is ApiErrorCode.REPLICA_LOST
        assert len(received) > 5 * 20
        assert num_dead(replicas) == 5


async def test_all_choices_of_a_suspect_have_two_trials_together():
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(mortal(str(i), 1)) for i in range(7)]
        async with routed(replicas[0]) as r:
            context = anyone()
            context.losses.num_replicas = 1
            choices = [await poison(r, context, f"poison{i}") for i in range(6)]
            await r.router.update_replicas([replica.address for replica in replicas])
            ends = [asyncio.create_task(read_to_error(stream)) for stream in choices]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            assert [end.result()[1].code for end in done] == [ApiErrorCode.REPLICA_LOST]
            reports = record_reports(r.router._links[str(living(replicas)[0])])
            await eventually(lambda: len(reports) > 3)
            assert len(living(replicas)) == 7 - 3
            for end in ends:
                end.cancel()
            await asyncio.gather(*ends, return_exceptions=True)
            await asyncio.gather(*(stream.aclose() for stream in choices))
            assert is_clean(r)


def use_turns_of(turn_s, monkeypatch):
    """Much shorter than a stream waits, which a busy machine must not make it do to the end."""
    monkeypatch.setattr(router, "_TURN_SHARE", turn_s / WAIT_S)


def living(replicas):
    return [i for i, replica in enumerate(replicas) if not replica.engine.is_dead]


async def test_where_one_replica_at_a_time_is_there_the_others_outlive_all_four_of_its_losses():
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(mortal(str(i), 3)) for i in range(5)]
        async with routed(replicas[0]) as r:
            others = [await innocent(r, i) for i in range(6)]
            received = [tokens([await anext(stream)]) for stream in others]
            ended = asyncio.create_task(read_to_error(await poison(r)))
            for dying, healed in zip(replicas[:4], replicas[1:], strict=True):
                await eventually(lambda dying=dying: dying.engine.is_dead)
                await r.router.update_replicas([healed.address])
            _, error = await ended
            assert error.code is ApiErrorCode.REPLICA_LOST
            for number, stream in enumerate(others):
                assert received[number] + tokens(await collect(stream)) == expected(number)
            assert num_dead(replicas) == 4
            assert is_clean(r)


@pytest.mark.nightly
async def test_replicas_that_heal_slowly_bring_suspects_back_one_at_a_time(monkeypatch):
    turn_s = 1.5
    monkeypatch.setattr(router, "_TURN_SHARE", turn_s / RouterSettings().move_wait_s)
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(mortal(str(i), 3)) for i in range(6)]
        async with routed(replicas[0]) as r:
            others = [await innocent(r, i) for i in range(3)]
            received = [tokens([await anext(stream)]) for stream in others]
            ended = asyncio.create_task(read_to_error(await poison(r)))
            for dying, healed in zip(replicas[:4], replicas[1:5], strict=True):
                await eventually(lambda dying=dying: dying.engine.is_dead)
                await asyncio.sleep(turn_s + 0.1)
                await r.router.update_replicas([healed.address])
            _, error = await ended
            assert error.code is ApiErrorCode.REPLICA_LOST
            for number, stream in enumerate(others):
                assert received[number] + tokens(await collect(stream)) == expected(number)
                assert stream.context.losses.num_trials == 0
            assert num_dead(replicas) == 4
            assert is_clean(r)


def stand_still_longer(r, by_s):
    """As if every stream had lost its replica so much earlier."""
    for stream in r.router._streams:
        stream.lost_s -= by_s


async def test_replicas_that_heal_in_the_last_moment_bring_suspects_back_one_at_a_time():
    with contextlib.ExitStack() as stack:
        replicas = [stack.enter_context(mortal(str(i), 3)) for i in range(6)]
        async with routed(replicas[0]) as r:
            others = [await innocent(r, i) for i in range(3)]
            received = [tokens([await anext(stream)]) for stream in others]
            ended = asyncio.create_task(read_to_error(await poison(r)))
            for dying, healed in zip(replicas[:4], replicas[1:5], strict=True):
                await eventually(
                    lambda dying=dying: (
                        dying.engine.is_dead
                        and r.router.num_waiting_requests == len(r.router._streams)
                    )
                )
                stand_still_longer(r, 0.95 * RouterSettings().move_wait_s)
                await r.router.update_replicas([healed.address])
            _, error = await ended
            assert error.code is ApiErrorCode.REPLICA_LOST
            for number, stream in enumerate(others):
                assert received[number] + tokens(await collect(stream)) == expected(number)
                assert stream.context.losses.num_trials == 0
            assert num_dead(replicas) == 4
            assert is_clean(r)


async def test_a_suspect_whose_time_ends_while_others_are_on_trial_waits_for_its_turn(monkeypatch):
    use_turns_of(1.5, monkeypatch)
    async with (
        mortals(1, 0, move_wait_s=WAIT_S) as (r, replicas),
        contextlib.AsyncExitStack() as stack,
    ):
        others = [await innocent(r, i) for i in range(3)]
        received = [tokens([await anext(stream)]) for stream in others]
        for stream in others:
            stream.context.losses.num_replicas = 1
        stuck = stack.enter_context(mortal("b", 0))
        stuck.engine.max_running = 0
        await asyncio.to_thread(replicas[0].kill)
        await eventually(lambda: r.router.num_waiting_requests == 3)
        lost_s = time.monotonic()
        await asyncio.sleep(1.6)
        await r.router.update_replicas([stuck.address])
        await eventually(lambda: stuck.engine.waiting)
        await eventually(lambda: len(stuck.engine.waiting) == 3)
        assert time.monotonic() - lost_s > 3.0, "its turn is counted from the trial on"
        stuck.engine.max_running = 100
        for number, stream in enumerate(others):
            assert received[number] + tokens(await collect(stream)) == expected(number)
        assert is_clean(r)


async def test_innocents_of_two_losses_are_sent_one_at_a_time_and_all_come_to_their_ends():
    async with mortals(1, 0) as (r, replicas), contextlib.AsyncExitStack() as stack:
        others = [await innocent(r, i) for i in range(8)]
        received = [tokens([await anext(stream)]) for stream in others]
        for name in ("b", "c"):
            healed = stack.enter_context(mortal(name, 0))
            await asyncio.to_thread(replicas[-1].kill)
            await eventually(lambda: r.router.num_waiting_requests == 8)
            healed.engine.max_running = 0  # no tokens come, so that nobody is above suspicion
            await r.router.update_replicas([healed.address])
            replicas.append(healed)
            await eventually(lambda healed=healed: healed.engine.requests)
        await eventually(lambda: replicas[-1].engine.num_steps > 20)
        assert len(replicas[-1].engine.requests) == 1
        assert r.router.num_waiting_requests == 7
        replicas[-1].engine.max_running = 100
        for number, stream in enumerate(others):
            assert received[number] + tokens(await collect(stream)) == expected(number)
        assert is_clean(r)


async def test_innocents_that_ran_at_every_lost_replica_all_go_on_at_once():
    async with mortals(1, 0) as (r, replicas), contextlib.AsyncExitStack() as stack:
        others = [await innocent(r, i) for i in range(8)]
        received = [tokens([await anext(stream)]) for stream in others]
        for name in "bcd":
            healed = stack.enter_context(mortal(name, 0))
            await eventually(lambda: all(one.num_new_tokens > TRIAL_TOKENS for one in others))
            await asyncio.to_thread(replicas[-1].kill)
            await eventually(lambda: r.router.num_waiting_requests == 8)
            healed.engine.max_running = 0
            await r.router.update_replicas([healed.address])
            replicas.append(healed)
            await eventually(lambda healed=healed: len(healed.engine.requests) == 8)
            healed.engine.max_running = 100
        assert [stream.num_losses for stream in others] == [3] * 8
        for number, stream in enumerate(others):
            assert received[number] + tokens(await collect(stream)) == expected(number)
        assert is_clean(r)


async def test_a_suspect_whose_turn_does_not_come_goes_when_its_share_of_the_time_is_over(
    monkeypatch,
):
    use_turns_of(1.0, monkeypatch)
    async with (
        mortals(1, 0, move_wait_s=WAIT_S) as (r, replicas),
        contextlib.AsyncExitStack() as stack,
    ):
        others = [await innocent(r, i) for i in range(3)]
        received = [tokens([await anext(stream)]) for stream in others]
        for stream in others:
            stream.context.losses.num_replicas = 1
        stuck = stack.enter_context(mortal("b", 0))
        stuck.engine.max_running = 0
        await r.router.update_replicas([replicas[0].address, stuck.address])
        await eventually(lambda: r.router.num_connected_replicas == 2)
        await asyncio.to_thread(replicas[0].kill)
        await eventually(lambda: len(stuck.engine.waiting) == 3)
        stuck.engine.max_running = 100
        for number, stream in enumerate(others):
            assert received[number] + tokens(await collect(stream)) == expected(number)
