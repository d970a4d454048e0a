"""An engine without Ray, on this machine alone: one rank here, further ones as child processes."""

import logging
import os

from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.observer import StepRecord
from workers.loading.weights import OnProgress
from workers.parallel.local_followers import start_local_followers
from workers.parallel.rank_process import FAILED_RANK_EXIT_CODE
from workers.parallel.tp_engine import build_tp_engine

logger = logging.getLogger(__name__)


def build_local_engine(config: EngineConfig, on_progress: OnProgress) -> Engine:
    """An engine of config.tp_size ranks, on CUDA devices 0 and up or on the CPU.

    Where a child dies this process ends too: a step under way may be stuck in a collective.
    Raises ConfigError, ModelLoadError, AttentionBackendError, EngineFailedError.
    """
    if config.tp_size == 1:
        return Engine.from_config(config, on_progress=on_progress)
    return build_tp_engine(config, start_local_followers, _end_process, _ignore_step, on_progress)


def _end_process(lost_rank: int) -> None:
    logger.error("tensor-parallel rank %d died", lost_rank)
    os._exit(FAILED_RANK_EXIT_CODE)


def _ignore_step(record: StepRecord) -> None:
    """Nobody watches."""
