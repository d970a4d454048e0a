"""How rank 0 waits for its followers, and what becomes of the engine if they do not come."""

import socket
import threading
import time
from pathlib import Path

import pytest
import torch

from workers.config import EngineConfig
from workers.errors import EngineFailedError
from workers.parallel.plan_channel import PlanReceiver, PlanSender
from workers.parallel.rank_group import RankGroup
from workers.parallel.rendezvous import plan_socket_path

CPU = torch.device("cpu")
CONFIG = EngineConfig(model="builtin", tp_size=3)


class SilentFollowers:
    """Started, and neither ended nor connected; what they were told is kept."""

    def __init__(self, has_ended=False):
        self.has_ended = has_ended
        self.directory = Path()

    def __call__(self, config, directory, auth_key):
        self.directory = directory
        self.auth_key = auth_key
        return self

    def wait_for_end(self, timeout_s):
        if not self.has_ended:
            time.sleep(timeout_s)
        return self.has_ended


class OneComes(SilentFollowers):
    """Rank 1 joins the plan channel, rank 2 does not."""

    def __call__(self, config, directory, auth_key):
        super().__call__(config, directory, auth_key)
        self.ended = threading.Event()
        threading.Thread(target=self.follow, daemon=True).start()
        return self

    def follow(self):
        receiver = PlanReceiver(plan_socket_path(self.directory), self.auth_key, 1)
        assert receiver.receive() is None
        self.ended.set()


class Visited(SilentFollowers):
    """Somebody without the key connects and leaves."""

    has_called = False

    def wait_for_end(self, timeout_s):
        if not self.has_called:
            with socket.socket(socket.AF_UNIX) as caller:
                caller.connect(str(plan_socket_path(self.directory)))
            self.has_called = True
        return super().wait_for_end(timeout_s)


def lost(rank):
    raise AssertionError(f"rank {rank} was never there")


def test_a_rank_that_never_comes_ends_the_start() -> None:
    followers = SilentFollowers()
    with pytest.raises(EngineFailedError, match="within 0.5 s"):
        RankGroup(CONFIG, CPU, followers, lost, meet_timeout_s=0.5)
    assert not followers.directory.exists()


def test_nobody_waits_for_ranks_after_the_start_has_failed() -> None:
    before = threading.active_count()
    with pytest.raises(EngineFailedError, match="within 0.5 s"):
        RankGroup(CONFIG, CPU, SilentFollowers(), lost, meet_timeout_s=0.5)
    deadline_s = time.monotonic() + 60.0
    while threading.active_count() > before:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_stranger_does_not_count_as_a_rank() -> None:
    followers = Visited()
    with pytest.raises(EngineFailedError, match="within 1 s"):
        RankGroup(CONFIG, CPU, followers, lost, meet_timeout_s=1.0)
    assert followers.has_called


def test_a_channel_that_fails_ends_the_start(monkeypatch) -> None:
    monkeypatch.setattr(PlanSender, "accept", lambda *arguments: None)
    with pytest.raises(EngineFailedError, match="before all ranks had joined"):
        RankGroup(CONFIG, CPU, SilentFollowers(), lost, meet_timeout_s=30.0)


def test_a_rank_that_ends_before_it_comes_ends_the_start() -> None:
    followers = SilentFollowers(has_ended=True)
    with pytest.raises(EngineFailedError, match="ended before it joined"):
        RankGroup(CONFIG, CPU, followers, lost)
    assert not followers.directory.exists()


def test_ranks_that_came_are_told_to_end_when_another_does_not() -> None:
    followers = OneComes()
    with pytest.raises(EngineFailedError, match="within 4 s"):
        RankGroup(CONFIG, CPU, followers, lost, meet_timeout_s=4.0)
    assert followers.ended.wait(60.0)
