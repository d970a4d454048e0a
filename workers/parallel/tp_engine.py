"""An engine over several ranks: rank 0 in this process, the others wherever they are started."""

from collections.abc import Callable

from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.observer import OnStep
from workers.loading.weights import OnProgress
from workers.parallel.rank_group import BroadcastStepExecutor, RankGroup, StartFollowers
from workers.runner.executor import StepExecutor
from workers.runner.factory import make_model_runner
from workers.runner.sizing import resolve_device


def build_tp_engine(
    config: EngineConfig,
    start_followers: StartFollowers,
    on_rank_lost: Callable[[int], None],
    on_step: OnStep,
    on_progress: OnProgress,
) -> Engine:
    """Start config.tp_size - 1 followers, meet them and load every rank's share.

    on_rank_lost(rank) is called from another thread when a follower dies: the engine is of no more
    use then, and a step in flight may be stuck in a collective, so the caller should end the
    process.
    Raises ConfigError, ModelLoadError, EngineFailedError.
    """
    device = resolve_device(config)
    ranks = RankGroup(config, device, start_followers, on_rank_lost)
    runner = make_model_runner(config, ranks.tp, device, on_progress)

    def with_followers(executor: StepExecutor) -> StepExecutor:
        return BroadcastStepExecutor(executor, ranks)

    return Engine.of_runner(config, runner, wrap_executor=with_followers, on_step=on_step)
