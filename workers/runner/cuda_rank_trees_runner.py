"""A CUDA rank whose drafts are trees, made by a model or a head beside its own."""

from typing import ClassVar

from workers.config import EngineConfig
from workers.graphs.draft_graphs import DraftGraphs
from workers.graphs.graph_set import CudaGraphCapturer, build_tree_draft_graphs
from workers.graphs.verify_graphs import MAX_TREE_TOKENS
from workers.runner.ahead_drafts import AheadTrees
from workers.runner.ahead_executor import ahead_tree_drafting_executor
from workers.runner.cuda_rank_drafts_runner import CudaRankDraftsRunner
from workers.runner.cuda_trees_runner import CudaTreesRunner
from workers.runner.executor import StepExecutor
from workers.runner.rank_trees_runner import RankTreesRunner
from workers.scheduler.plan import StepPlan
from workers.speculation.device_step import DrafterStep
from workers.speculation.step_trees import LinedUp


class CudaRankTreesRunner(RankTreesRunner, CudaTreesRunner, CudaRankDraftsRunner):
    """As RankTreesRunner and CudaTreesRunner, of drafts as CudaRankDraftsRunner makes them."""

    _max_verify_tokens: ClassVar[int] = MAX_TREE_TOKENS

    def _build_draft_graphs(
        self, config: EngineConfig, capturer: CudaGraphCapturer
    ) -> DraftGraphs | None:
        padding_slot = config.max_running_requests
        return build_tree_draft_graphs(config, self._device_drafter, padding_slot, capturer)

    def with_drafts(self, executor: StepExecutor) -> StepExecutor:
        if self._draft_graphs is None:
            return super().with_drafts(executor)
        self._ahead = ahead = AheadTrees(self._draft_graphs, self._mailbox.send, self._tree)
        num_slots, max_context_len = self._req_to_token.shape
        return ahead_tree_drafting_executor(
            executor, num_slots, max_context_len, self._tree, self._mailbox.named, ahead
        )

    def _behind_lines(self, step: DrafterStep, lined: LinedUp) -> None:
        super()._behind_lines(step, lined)
        if isinstance(self._ahead, AheadTrees):
            self._ahead.holds(step, lined)

    def _step_of_replay(self, plan: StepPlan) -> DrafterStep:
        """As its drafts have been made."""
        if self._replayed_step is None:
            raise RuntimeError("a step is replayed whose drafts nobody has made")
        return self._replayed_step
