"""How rank 0 waits for its followers, and what becomes of the engine if they do not come."""

import threading
import time
from pathlib import Path

import pytest
import torch

from workers.config import EngineConfig
from workers.errors import EngineFailedError
from workers.parallel.meeting import plan_socket_path
from workers.parallel.plan_channel import PlanReceiver
from workers.parallel.rank_group import RankGroup

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


def lost(rank):
    raise AssertionError(f"rank {rank} was never there")


def test_a_rank_that_never_comes_ends_the_start() -> None:
    followers = SilentFollowers()
    with pytest.raises(EngineFailedError, match="within 0.5 s"):
        RankGroup(CONFIG, CPU, followers, lost, meet_timeout_s=0.5)
    assert not followers.directory.exists()


def test_a_rank_that_ends_before_it_comes_ends_the_start() -> None:
    followers = SilentFollowers(has_ended=True)
    with pytest.raises(EngineFailedError, match="ended before it joined"):
        RankGroup(CONFIG, CPU, followers, lost)
    assert not followers.directory.exists()


def test_ranks_that_came_are_told_to_end_when_another_does_not() -> None:
    followers = OneComes()
    with pytest.raises(EngineFailedError, match="within 1 s"):
        RankGroup(CONFIG, CPU, followers, lost, meet_timeout_s=1.0)
    assert followers.ended.wait(10.0)
