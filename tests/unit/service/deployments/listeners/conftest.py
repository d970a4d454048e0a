"""Both event loops: Ray has uvloop where that is installed, else asyncio's. Transports differ."""

import asyncio
import functools

import pytest
import uvloop


@pytest.fixture(
    params=[
        pytest.param(asyncio.new_event_loop, id="asyncio", marks=pytest.mark.nightly),
        pytest.param(uvloop.new_event_loop, id="uvloop"),
    ]
)
def run(request):
    """Runs a coroutine on one of the event loops."""
    return functools.partial(run_on_loop, request.param)


@pytest.fixture
def run_once():
    return functools.partial(run_on_loop, uvloop.new_event_loop)


def run_on_loop(loop_factory, work):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(asyncio.wait_for(work, 30))
