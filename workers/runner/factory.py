"""Which runner drives a device."""

import torch

from workers.config import EngineConfig
from workers.loading.weights import OnProgress
from workers.parallel.group import TPGroup
from workers.runner.cuda_model_runner import CudaModelRunner
from workers.runner.model_runner import ModelRunner


def make_model_runner(
    config: EngineConfig, tp: TPGroup, device: torch.device, on_progress: OnProgress
) -> ModelRunner:
    """The runner of one rank. Raises what its constructor raises; see ModelRunner."""
    runner = CudaModelRunner if device.type == "cuda" else ModelRunner
    return runner(config, tp, device, on_progress)
