"""Bounds of the gRPC port where no server is needed to see them."""

import asyncio
import contextlib
import errno
import os
import socket

import pytest

from service.api import grpc_doorkeeper
from service.api.grpc_doorkeeper import Doorkeeper, pause_after
from service.api.grpc_side_streams import MAX_READING, READING_S, SideStreams
from service.security.connections import GrpcConnectionLimits


class LoopWithoutTime(asyncio.SelectorEventLoop):
    """Counts milliseconds, as uvloop does: 1.1 s less 0.1 s may come before 1 s."""

    now_s = 0.0

    def time(self):
        return self.now_s


def num_left_reading(loop, began_ms):
    """Of 20 streams that began to read then, when READING_S have passed."""

    async def read_for_long():
        streams = SideStreams(GrpcConnectionLimits())
        loop.now_s = began_ms / 1000
        with contextlib.ExitStack() as stack:
            entered = [streams.enter(str(peer)) for peer in range(20)]
            for stream in entered:
                stack.enter_context(streams.reading(stream))
            loop.now_s = (began_ms + round(READING_S * 1000)) / 1000
            for _ in range(3):
                await asyncio.sleep(0)
            return sum(not stream.done() for stream in entered)

    return loop.run_until_complete(read_for_long())


def test_slow_messages_give_way_whatever_the_clock_shows():
    with contextlib.closing(LoopWithoutTime()) as loop:
        left = {num_left_reading(loop, began_ms) for began_ms in range(1000, 1200)}
    assert left == {MAX_READING}


class BrokenLook:
    """Fails so often with that error, then succeeds for good."""

    def __init__(self, code, num_failures):
        self._code = code
        self._num_left = num_failures
        self.has_succeeded = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self):
        if self._num_left:
            self._num_left -= 1
            raise OSError(self._code, "no look")
        self._loop.call_soon_threadsafe(self.has_succeeded.set)
        return 0


def keeper(monkeypatch, look):
    monkeypatch.setattr(grpc_doorkeeper, "num_open_files", look)
    monkeypatch.setattr(grpc_doorkeeper, "_SWEEP_S", 0.001)
    doorkeeper = Doorkeeper(GrpcConnectionLimits())
    doorkeeper.port = 1
    return asyncio.create_task(doorkeeper.run())


@pytest.mark.asyncio
async def test_the_doorkeeper_goes_on_when_there_are_files_again(monkeypatch, caplog):
    look = BrokenLook(errno.EMFILE, 2)
    running = keeper(monkeypatch, look)
    async with asyncio.timeout(20):
        succeeding = asyncio.create_task(look.has_succeeded.wait())
        done, _ = await asyncio.wait([running, succeeding], return_when=asyncio.FIRST_COMPLETED)
    assert running not in done, running.exception()
    assert caplog.text.count("cannot be looked at") == 2
    running.cancel()


@pytest.mark.asyncio
async def test_other_failures_of_a_look_end_the_doorkeeper(monkeypatch):
    with pytest.raises(OSError, match="no look"):
        async with asyncio.timeout(20):
            await keeper(monkeypatch, BrokenLook(errno.EACCES, 1))


@pytest.mark.asyncio
async def test_who_could_not_be_hung_up_for_want_of_a_file_is_at_the_next_look(monkeypatch, caplog):
    monkeypatch.setattr(grpc_doorkeeper, "_SWEEP_S", 0.001)
    monkeypatch.setattr(grpc_doorkeeper, "PROMPT_S", 0.0)
    doorkeeper = Doorkeeper(GrpcConnectionLimits(max_side_streams=1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        doorkeeper.port = listener.getsockname()[1]
        client = socket.create_connection(listener.getsockname(), timeout=5)
        accepted, (host, port) = listener.accept()
        with client, accepted:
            with pytest.raises(asyncio.CancelledError):
                await doorkeeper.end(f"ipv4:{host}:{port}", asyncio.Event().wait())
            with monkeypatch.context() as full:
                look = BrokenLook(errno.EMFILE, 1000)
                full.setattr(os, "dup", lambda _: look())
                await doorkeeper.sweep()
                await doorkeeper.sweep()
            client.setblocking(False)
            with pytest.raises(BlockingIOError):
                client.recv(1)
            assert caplog.text.count("1 connections of the gRPC port cannot be closed") == 2
            await doorkeeper.sweep()
            assert client.recv(1) == b""
            assert len(caplog.records) == 2


@pytest.mark.parametrize(("look_s", "pause_s"), [(0.0, 0.5), (0.01, 0.5), (0.04, 2.0), (60.0, 5.0)])
def test_looks_that_take_long_are_seldom(look_s, pause_s):
    assert pause_after(look_s) == pytest.approx(pause_s)
