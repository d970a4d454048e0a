"""Followers as Ray actors in rank 0's placement group, which has one bundle per rank.

Ray places them and notices their death; plans and collectives go past it.
"""

from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.parallel.rank_process import RankProcess


class _Follower(NamedTuple):
    """An actor's handle and the reference of its run() call, which ends only with it."""

    actor: Any
    run: Any


class RayFollowers:
    """Holds the actors' handles: Ray ends an actor that nobody holds a handle of."""

    def __init__(self, followers: list[_Follower]) -> None:
        self._followers = followers

    def wait_for_end(self, timeout_s: float) -> bool:
        ended, _ = ray.wait([follower.run for follower in self._followers], timeout=timeout_s)
        return bool(ended)


def start_ray_followers(config: EngineConfig, directory: Path, auth_key: bytes) -> RayFollowers:
    """One actor per rank above 0, each in the bundle of its rank. Their run() is under way.

    Must run inside an actor of that placement group. Raises ConfigError if there is none.
    """
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
        followers.append(_Follower(handle, handle.run.remote()))
    return RayFollowers(followers)
