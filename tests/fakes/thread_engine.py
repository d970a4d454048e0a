"""An engine whose tensor-parallel ranks are threads of this process: plans go through a queue."""

import queue
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Generic, TypeVar

from tests.fakes.thread_ranks import ThreadRank, ThreadRanks
from workers.config import EngineConfig
from workers.constraints.masks import StepMasks
from workers.engine.engine import Engine
from workers.runner.executor import PendingStep, StepExecutor
from workers.runner.model_runner import ModelRunner
from workers.scheduler.plan import StepPlan

Rank = TypeVar("Rank", bound=ModelRunner)


class FollowedExecutor(Generic[Rank]):
    """As BroadcastStepExecutor."""

    def __init__(self, inner: StepExecutor, follower: Rank) -> None:
        self._inner = inner
        self._follower = follower
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._pool = ThreadPoolExecutor(1)
        self._followed: Future[None] = self._pool.submit(self._follow)

    def _follow(self) -> None:
        while (plan := self._plans.get()) is not None:
            self._follower.run_follower(plan)

    def launch(self, plan: StepPlan) -> PendingStep:
        self._plans.put(plan)
        return self._inner.launch(plan)

    def named(self, plan: StepPlan) -> StepPlan:
        return self._inner.named(plan)

    def provide(self, masks: StepMasks) -> None:
        self._follower._masks.put(masks)
        self._inner.provide(masks)

    def forget_masks(self) -> None:
        self._follower._masks.close()
        self._inner.forget_masks()

    def prepare_while_idle(self) -> bool:
        return self._inner.prepare_while_idle()

    def close(self) -> None:
        """Raises what the follower raised."""
        self._inner.close()
        self._plans.put(None)
        self._pool.shutdown()
        self._followed.result()


@contextmanager
def engine_of_two(
    config: EngineConfig,
    make: Callable[[ThreadRank], Rank],
    group: Callable[[ThreadRanks, int], ThreadRank] = ThreadRank,
) -> Iterator[tuple[Engine, list[Rank]]]:
    """The engine and its two ranks' runners. group: of a rank."""
    ranks = ThreadRanks(2)
    with ThreadPoolExecutor(2) as pool:
        starting = [pool.submit(make, group(ranks, rank)) for rank in range(2)]
    runners = [one.result() for one in starting]
    engine = Engine.of_runner(
        config, runners[0], wrap_executor=lambda inner: FollowedExecutor(inner, runners[1])
    )
    try:
        yield engine, runners
    finally:
        engine.close()
