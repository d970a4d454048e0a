"""Both event loops: Ray has uvloop where that is installed, else asyncio's. Transports differ."""

import asyncio
import contextlib
import functools
import time

import pytest
import uvloop

_TICK_S = 0.02
_LONGEST_STEP_S = 0.05


class SteadyTime:
    """A loop whose clock leaves out what the process did not run: a reading is at most so much
    later than the one before it, and tick() reads it often. Deadlines of connections go by it.
    """

    _steady_s = 0.0
    _read_s = 0.0

    def time(self):
        now_s = time.monotonic()
        self._steady_s += min(now_s - self._read_s, _LONGEST_STEP_S)
        self._read_s = now_s
        return self._steady_s

    async def tick(self):
        while True:
            self.time()
            await asyncio.sleep(_TICK_S)


class SteadyAsyncioLoop(SteadyTime, asyncio.SelectorEventLoop):
    """asyncio's own, its timers included."""


class SteadyUvloop(SteadyTime, uvloop.Loop):
    """Its timers are libuv's and go by the machine's clock."""


@pytest.fixture(
    params=[
        pytest.param(SteadyAsyncioLoop, id="asyncio", marks=pytest.mark.nightly),
        pytest.param(SteadyUvloop, id="uvloop"),
    ]
)
def run(request):
    """Runs a coroutine on one of the event loops."""
    return functools.partial(run_on_loop, request.param)


@pytest.fixture
def run_once():
    return functools.partial(run_on_loop, SteadyUvloop)


def run_on_loop(loop_factory, work):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(beside_ticks(work))


async def beside_ticks(work):
    ticking = asyncio.create_task(asyncio.get_running_loop().tick())
    try:
        return await asyncio.wait_for(work, 120)
    finally:
        ticking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await ticking
