"""Rank 0's side of tensor parallelism: starts the followers in the placement group, meets them.

Must run inside an actor whose placement group has one bundle per rank; rank 0 is the caller.
"""

import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ray
import torch
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from workers.config import EngineConfig
from workers.errors import ConfigError, EngineFailedError
from workers.executor import PendingStep, StepExecutor
from workers.parallel.meeting import connect_rank, plan_socket_path
from workers.parallel.plan_channel import PlanSender, make_auth_key
from workers.parallel.rank_process import RankProcess
from workers.scheduler.plan import StepPlan

MEET_POLL_S = 0.2


class Follower(NamedTuple):
    """A follower's actor handle and the reference of its run() call, which ends only with it."""

    actor: Any
    run: Any


class RankGroup:
    """The followers of one engine and the channel to them.

    on_lost(rank) is called once, from a watcher thread, when a follower's process goes away.
    """

    def __init__(
        self, config: EngineConfig, device: torch.device, on_lost: Callable[[int], None]
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="tessera-ranks-"))
        auth_key = make_auth_key()
        self.sender = PlanSender(plan_socket_path(self._directory), auth_key)
        # Ray ends an actor that nobody holds a handle of.
        self._followers = start_followers(config, self._directory, auth_key)
        self._meet(on_lost)
        self.tp = connect_rank(self._directory, 0, config.tp_size, device)

    def _meet(self, on_lost: Callable[[int], None]) -> None:
        """Wait until every follower has connected. Raises EngineFailedError if one ends first."""
        accepting = threading.Thread(
            target=self.sender.accept, args=(len(self._followers), on_lost), daemon=True
        )
        accepting.start()
        while accepting.is_alive():
            ended, _ = ray.wait([follower.run for follower in self._followers], timeout=MEET_POLL_S)
            if ended and accepting.is_alive():
                raise EngineFailedError("a rank process ended before it joined its engine")

    def close(self) -> None:
        """Close the plan channel: followers finish their step and end their processes."""
        self.sender.close()
        shutil.rmtree(self._directory, ignore_errors=True)


class BroadcastStepExecutor:
    """Sends each plan to the followers, then launches it on this rank."""

    def __init__(self, inner: StepExecutor, ranks: RankGroup) -> None:
        self._inner = inner
        self._ranks = ranks

    def launch(self, plan: StepPlan) -> PendingStep:
        self._ranks.sender.send(plan)
        return self._inner.launch(plan)

    def prepare_while_idle(self) -> bool:
        """Nothing: followers do what plans tell them, and a graph's capture takes all ranks."""
        return False

    def close(self) -> None:
        self._inner.close()
        self._ranks.close()


def start_followers(config: EngineConfig, directory: Path, auth_key: bytes) -> list[Follower]:
    """One actor per rank above 0, each in the bundle of its rank. Their run() is under way."""
    placement_group = ray.util.get_current_placement_group()
    if placement_group is None or placement_group.bundle_count < config.tp_size:
        raise ConfigError(
            f"tp_size={config.tp_size} needs a placement group with one bundle per rank"
        )
    followers = []
    for rank in range(1, config.tp_size):
        bundle = placement_group.bundle_specs[rank]
        actor = ray.remote(RankProcess).options(
            num_cpus=bundle.get("CPU", 0),
            num_gpus=bundle.get("GPU", 0),
            max_restarts=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=placement_group, placement_group_bundle_index=rank
            ),
        )
        handle: Any = actor.remote(config, rank, str(directory), auth_key)
        followers.append(Follower(handle, handle.run.remote()))
    return followers
