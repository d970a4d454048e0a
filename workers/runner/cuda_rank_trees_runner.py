"""A CUDA rank whose drafts are trees, made by a model or a head beside its own."""

from collections.abc import Callable
from functools import partial
from typing import ClassVar

import torch

from workers.config import EngineConfig
from workers.graphs.draft_graphs import DraftGraphs
from workers.graphs.graph_set import (
    MAX_GRAPH_BATCH_SIZE,
    CudaGraphCapturer,
    build_tree_draft_graphs,
)
from workers.graphs.tree_verify_graphs import TreeVerifyGraphs
from workers.graphs.verify_graphs import MAX_TREE_TOKENS, VerifyGraphs
from workers.runner.cuda_model_runner import StepGraphs
from workers.runner.cuda_rank_drafts_runner import CudaRankDraftsRunner
from workers.runner.rank_trees_runner import RankTreesRunner
from workers.runner.step_inputs import BegunStep
from workers.runner.step_pieces import ReadableStep
from workers.scheduler.plan import StepPlan
from workers.speculation.device_step import DrafterStep


class CudaRankTreesRunner(RankTreesRunner, CudaRankDraftsRunner):
    """As RankTreesRunner and CudaRankDraftsRunner. Behind a replay, the path that holds is lined up
    once its samples are drawn."""

    _max_graphed_tokens: ClassVar[int] = max(MAX_GRAPH_BATCH_SIZE, MAX_TREE_TOKENS)
    _unlined: tuple[TreeVerifyGraphs, DrafterStep] | None = None

    def _build_draft_graphs(
        self, config: EngineConfig, capturer: CudaGraphCapturer
    ) -> DraftGraphs | None:
        padding_slot = config.max_running_requests
        return build_tree_draft_graphs(config, self._device_drafter, padding_slot, capturer)

    def _verify_class(self, config: EngineConfig) -> Callable[..., VerifyGraphs]:
        return partial(TreeVerifyGraphs, deepest=len(config.draft_tree))

    def _begin(self, plan: StepPlan) -> BegunStep:
        self._unlined = None
        return super()._begin(plan)

    def _prepare_replay(self, graphs: StepGraphs, plan: StepPlan) -> None:
        super()._prepare_replay(graphs, plan)
        step, self._unlined = self._replayed_step, None
        if isinstance(graphs, TreeVerifyGraphs) and step is not None:
            graphs.name_trees(step.trees)
            self._unlined = graphs, step

    @torch.inference_mode()
    def _launch_any(self, plan: StepPlan) -> ReadableStep:
        launched = super()._launch_any(plan)
        self._line_up_replayed()
        return launched

    @torch.inference_mode()
    def _finish_replay(self, graphs: StepGraphs, plan: StepPlan) -> ReadableStep:
        launched = super()._finish_replay(graphs, plan)
        self._line_up_replayed()
        return launched

    def _line_up_replayed(self) -> None:
        """Behind what a drafter makes of all of the step's tokens, and behind their samples."""
        unlined, self._unlined = self._unlined, None
        if unlined is not None and unlined[1].trees is not None:
            graphs, step = unlined
            self._line_up(step, graphs.sampled)
