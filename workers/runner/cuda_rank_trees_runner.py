"""A CUDA rank whose drafts are trees, made by a model or a head beside its own."""

from typing import ClassVar

from workers.config import EngineConfig
from workers.graphs.draft_graphs import DraftGraphs
from workers.graphs.graph_set import CudaGraphCapturer, build_tree_draft_graphs
from workers.graphs.verify_graphs import MAX_TREE_TOKENS
from workers.runner.cuda_rank_drafts_runner import CudaRankDraftsRunner
from workers.runner.cuda_trees_runner import CudaTreesRunner
from workers.runner.rank_trees_runner import RankTreesRunner
from workers.scheduler.plan import StepPlan
from workers.speculation.device_step import DrafterStep


class CudaRankTreesRunner(RankTreesRunner, CudaTreesRunner, CudaRankDraftsRunner):
    """As RankTreesRunner and CudaTreesRunner, of drafts as CudaRankDraftsRunner makes them."""

    _max_verify_tokens: ClassVar[int] = MAX_TREE_TOKENS

    def _build_draft_graphs(
        self, config: EngineConfig, capturer: CudaGraphCapturer
    ) -> DraftGraphs | None:
        padding_slot = config.max_running_requests
        return build_tree_draft_graphs(config, self._device_drafter, padding_slot, capturer)

    def _step_of_replay(self, plan: StepPlan) -> DrafterStep:
        """As its drafts have been made."""
        if self._replayed_step is None:
            raise RuntimeError("a step is replayed whose drafts nobody has made")
        return self._replayed_step
