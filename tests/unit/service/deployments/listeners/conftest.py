"""Both event loops: Ray has either, and their transports differ."""

import asyncio
import functools

import pytest
import uvloop


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request):
    """Runs a coroutine on either event loop: Ray has both, and their transports differ."""
    return functools.partial(run_on_loop, request.param)


@pytest.fixture
def run_once():
    return functools.partial(run_on_loop, uvloop.new_event_loop)


def run_on_loop(loop_factory, work):
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        return runner.run(asyncio.wait_for(work, 30))
