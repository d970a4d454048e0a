"""Rank 0's side of tensor parallelism: meets the followers and sends them what it runs itself.

Knows nothing of how a follower's process came to be: ray_followers.py and local_followers.py do.
"""

import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

from workers.config import EngineConfig
from workers.constraints.masks import StepMasks
from workers.errors import EngineFailedError
from workers.parallel.plan_channel import PlanSender, make_auth_key
from workers.parallel.rendezvous import COLLECTIVE_TIMEOUT_S, connect_rank, plan_socket_path
from workers.runner.executor import PendingStep, StepExecutor
from workers.scheduler.plan import StepPlan

MEET_POLL_S = 0.2


class Followers(Protocol):
    """The processes of ranks 1 and up; each ends when rank 0 closes its plan channel."""

    def wait_for_end(self, timeout_s: float) -> bool:
        """Whether any of them has ended; waits at most timeout_s for it."""


StartFollowers = Callable[[EngineConfig, Path, bytes], Followers]
"""(config, directory, auth_key): start config.tp_size - 1 followers that meet rank 0 in the
directory. Raises ConfigError where there is no room for them."""


class RankGroup:
    """The followers of one engine and the channel to them.

    on_lost(rank) is called once, from a watcher thread, when a follower's process goes away.
    Raises EngineFailedError where followers do not come: one ended, or meet_timeout_s passed.
    """

    def __init__(
        self,
        config: EngineConfig,
        device: torch.device,
        start_followers: StartFollowers,
        on_lost: Callable[[int], None],
        meet_timeout_s: float = COLLECTIVE_TIMEOUT_S,
    ) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="tessera-ranks-"))
        auth_key = make_auth_key()
        self.sender = PlanSender(plan_socket_path(self._directory), auth_key)
        self._followers = start_followers(config, self._directory, auth_key)
        try:
            self._meet(config.tp_size - 1, on_lost, meet_timeout_s)
            self.tp = connect_rank(config, self._directory, 0, device)
        except BaseException:
            # Followers end with the channel.
            self.sender.close()
            shutil.rmtree(self._directory, ignore_errors=True)
            raise

    def _meet(self, num_followers: int, on_lost: Callable[[int], None], timeout_s: float) -> None:
        """Wait until every follower has connected."""
        accepting = threading.Thread(
            target=self.sender.accept, args=(num_followers, on_lost), daemon=True
        )
        accepting.start()
        deadline_s = time.monotonic() + timeout_s
        while accepting.is_alive():
            if self._followers.wait_for_end(MEET_POLL_S) and accepting.is_alive():
                raise EngineFailedError("a rank process ended before it joined its engine")
            if time.monotonic() > deadline_s and accepting.is_alive():
                raise EngineFailedError(f"a rank did not join its engine within {timeout_s:g} s")
        if self.sender.num_followers < num_followers:
            raise EngineFailedError("the plan channel failed before all ranks had joined")

    def close(self) -> None:
        """Close the plan channel: followers finish their step, leave the group with this rank and
        end their processes. No step may be under way here. The channel closes whatever else fails.
        """
        try:
            self.sender.close()
        finally:
            shutil.rmtree(self._directory, ignore_errors=True)
            self.tp.close()


class BroadcastStepExecutor:
    """Sends each plan to the followers, then launches it on this rank."""

    def __init__(self, inner: StepExecutor, ranks: RankGroup) -> None:
        self._inner = inner
        self._ranks = ranks

    def launch(self, plan: StepPlan) -> PendingStep:
        self._ranks.sender.send(plan)
        return self._inner.launch(plan)

    def named(self, plan: StepPlan) -> StepPlan:
        """Ranks name drafts alike."""
        return self._inner.named(plan)

    def provide(self, masks: StepMasks) -> None:
        """Right behind the plan that waits for them: no other frame comes between."""
        self._ranks.sender.send_masks(masks)
        self._inner.provide(masks)

    def forget_masks(self) -> None:
        """A follower that waits for some ends with the channel."""
        self._inner.forget_masks()

    def prepare_while_idle(self) -> bool:
        """On all ranks: capturing a graph takes all of them, and all have the same to do."""
        self._ranks.sender.send_prepare()
        return self._inner.prepare_while_idle()

    def close(self) -> None:
        """Followers end even where this rank's device has failed."""
        try:
            self._inner.close()
        finally:
            self._ranks.close()
