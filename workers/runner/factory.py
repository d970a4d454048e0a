"""Which runner drives a device."""

import torch

from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.loading.weights import OnProgress
from workers.parallel.group import TPGroup
from workers.runner.cuda_model_runner import CudaModelRunner
from workers.runner.cuda_rank_drafts_runner import CudaRankDraftsRunner
from workers.runner.cuda_rank_trees_runner import CudaRankTreesRunner
from workers.runner.cuda_trees_runner import CudaHostTreesRunner
from workers.runner.model_runner import ModelRunner
from workers.runner.paged_drafter_runner import PagedDrafterRunner
from workers.runner.rank_trees_runner import check_cuda_trees
from workers.runner.speculative_runner import SpeculativeModelRunner
from workers.runner.token_by_token_runner import TokenByTokenRunner
from workers.speculation.config import METHODS_BESIDE, METHODS_ON_CPU_ONLY


def make_model_runner(
    config: EngineConfig, tp: TPGroup, device: torch.device, on_progress: OnProgress
) -> ModelRunner:
    """The runner of one rank. Raises what its constructor raises; see ModelRunner."""
    return _runner_class(config, device)(config, tp, device, on_progress)


def _runner_class(config: EngineConfig, device: torch.device) -> type[ModelRunner]:
    speculation = config.speculation
    if speculation is None and config.draft_tree:
        raise ConfigError(
            f"draft_tree={list(config.draft_tree)} and nobody who proposes drafts: name one by "
            "speculative, or leave it out"
        )
    has_drafter = speculation is not None and speculation.method in METHODS_BESIDE
    if device.type == "cuda":
        if speculation is not None and speculation.method in METHODS_ON_CPU_ONLY:
            raise ConfigError(
                f"speculative={config.speculative!r}: {speculation.method} runs on CPU only so far"
            )
        if speculation is not None and speculation.tree:
            check_cuda_trees(config, speculation)
            return CudaRankTreesRunner if has_drafter else CudaHostTreesRunner
        return CudaRankDraftsRunner if has_drafter else CudaModelRunner
    if config.deterministic:
        return TokenByTokenRunner
    if speculation is None:
        return ModelRunner
    return PagedDrafterRunner if has_drafter else SpeculativeModelRunner
