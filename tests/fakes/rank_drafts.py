"""Ranks on CPU that make drafts as one on CUDA does: of plans that leave their places open."""

from functools import partial

import torch

from attention.forward_batch import StepShape
from attention.graph_timing import GraphAttentionTimer
from tests.fakes.drafted_runner import ClosureCapturer, ReplayedVerifyBackend
from tests.fakes.side_streams import EagerSide
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.graphs.decode_graphs import AttentionTwins, DecodeGraphs
from workers.graphs.decode_step import TorchStepKernels
from workers.graphs.draft_graphs import DraftGraphs, draft_graph_lengths
from workers.graphs.draft_rows import TORCH_ROW_KERNELS
from workers.graphs.measured_turns import MeasuredTurns
from workers.graphs.ring import StagingRing
from workers.graphs.tree_draft_graphs import TreeDraftGraphs
from workers.graphs.verify_graphs import verify_shapes
from workers.layers.cuda.side_stream import SideStream
from workers.parallel.group import SingleRank, TPGroup
from workers.runner.cuda_model_runner import CudaModelRunner
from workers.runner.cuda_rank_drafts_runner import CudaRankDraftsRunner
from workers.runner.cuda_rank_trees_runner import CudaRankTreesRunner
from workers.runner.cuda_trees_runner import CudaHostTreesRunner
from workers.runner.executor import StepExecutor, StepOutcome, ThreadStepExecutor
from workers.runner.model_runner import ModelRunner
from workers.runner.rank_drafts_runner import RankDraftsRunner
from workers.runner.rank_trees_runner import RankTreesRunner
from workers.scheduler.plan import StepPlan
from workers.scheduler.scheduler import MAX_UNCOMMITTED_PLANS
from workers.speculation.device_pass import DevicePasses
from workers.speculation.draft_mailbox import Passed, PassedAtOnce
from workers.speculation.policies import draft_lengths

CPU = torch.device("cpu")
ALONE = SingleRank()


class EagerRank(RankDraftsRunner):
    num_padding_slots = 1

    def __init__(self, config: EngineConfig, tp: TPGroup = ALONE) -> None:
        super().__init__(config, tp, CPU, lambda done, total: None)
        self._config = config

    def engine(self) -> Engine:
        return Engine.of_runner(self._config, self)


class EagerTreeRank(RankTreesRunner, EagerRank):
    """Its drafts are trees."""


class ReplayingRunner(CudaModelRunner):
    """Launches as on CUDA, with closures for graphs, which are captured behind the steps that went
    without."""

    _sample_masked = ModelRunner._sample_masked
    prepare_while_idle = ModelRunner.prepare_while_idle

    def __init__(self, config: EngineConfig, tp: TPGroup = ALONE) -> None:
        ModelRunner.__init__(self, config, tp, CPU, lambda done, total: None)
        assert config.speculation is not None, "a rank of drafts is asked for with speculative"
        self._config, self._speculation = config, config.speculation
        self._backend = backend = ReplayedVerifyBackend(
            self._backend.config, self._backend.req_to_token_pool, self._backend.token_to_kv_pool
        )
        self._timer._backend = backend
        self.decodes, self.verifies = ClosureCapturer(), ClosureCapturer()
        tables = backend.req_to_token_pool.own_tables
        kernels = TorchStepKernels(tables, self._sampling.last_token_ids)
        max_rows = config.max_running_requests
        self._segments = None
        self._graphs = DecodeGraphs(
            self._decode_model(),
            backend,
            kernels,
            self.decodes,
            StagingRing.on_host(max_rows, MAX_UNCOMMITTED_PLANS, len(tables)),
            sorted({1, 4, max_rows}),
            max_rows,
            AttentionTwins(
                MeasuredTurns(0), lambda one: GraphAttentionTimer(one, lambda: None, lambda: None)
            ),
        )
        lengths = [1 + own for own in draft_lengths(config.speculation) if own]
        shapes = verify_shapes(max_rows, lengths)
        max_tokens = max(one.rows * one.tokens_per_row for one in shapes)
        self._verify_graphs = self._verify_class(
            self._verify_model(),
            backend,
            kernels,
            self.verifies,
            StagingRing.on_host(max_tokens, MAX_UNCOMMITTED_PLANS, len(tables)),
            shapes,
            max_rows,
        )

    def make_executor(self) -> StepExecutor:
        return ThreadStepExecutor(self.run, self._masks)

    def run(self, plan: StepPlan) -> StepOutcome:
        launch = partial(self._launch_by, self._graphs_of(plan))
        step = self._launch_within_memory(plan, launch)
        self._behind_samples()
        result = step.read()
        self._capture_after(plan)
        return StepOutcome(result, 0.0, 0.0, ())

    def _capture_after(self, plan: StepPlan) -> None:
        self._capture_missing(plan)

    def close(self) -> None:
        """Nothing runs behind the caller's back."""

    def engine(self) -> Engine:
        return Engine.of_runner(self._config, self)


class ReplayingRank(ReplayingRunner, CudaRankDraftsRunner):
    """Which makes drafts, in graphs as well."""

    def __init__(self, config: EngineConfig, tp: TPGroup = ALONE) -> None:
        super().__init__(config, tp)
        assert config.speculation is not None, "a rank of drafts is asked for with speculative"
        self.drafts, max_rows = ClosureCapturer(), config.max_running_requests
        drafter = self._device_drafter
        own = ReplayedVerifyBackend(
            drafter.backend.config,
            drafter.backend.req_to_token_pool,
            drafter.backend.token_to_kv_pool,
        )
        drafter.backend, drafter._passes = own, DevicePasses(own)
        shapes = verify_shapes(max_rows, draft_graph_lengths(drafter, config.speculation))
        self._draft_graphs = self._make_draft_graphs(config, own, shapes)

    def _make_draft_graphs(
        self, config: EngineConfig, backend: ReplayedVerifyBackend, shapes: list[StepShape]
    ) -> DraftGraphs:
        padding_slot = config.max_running_requests
        return DraftGraphs(
            self._device_drafter, backend, self.drafts, shapes, padding_slot, TORCH_ROW_KERNELS
        )

    def _side_stream(self) -> SideStream:
        self.side = EagerSide()
        return self.side

    def with_drafts(self, executor: StepExecutor) -> StepExecutor:
        """Steps run in a thread of their own: nothing is made ahead of them in another."""
        return RankDraftsRunner.with_drafts(self, executor)

    def _new_mark(self) -> Passed:
        return PassedAtOnce()

    def run(self, plan: StepPlan) -> StepOutcome:
        with self._mailbox.launching(plan.step_id):
            return super().run(plan)


class ReplayingTreeRank(CudaRankTreesRunner, ReplayingRank):
    """Its drafts are trees."""

    def _make_draft_graphs(
        self, config: EngineConfig, backend: ReplayedVerifyBackend, shapes: list[StepShape]
    ) -> DraftGraphs:
        padding_slot = config.max_running_requests
        made = self._device_drafter, backend, self.drafts, shapes, padding_slot, TORCH_ROW_KERNELS
        return TreeDraftGraphs(*made, config.draft_tree)


class ReplayingHostTrees(CudaHostTreesRunner, ReplayingRunner):
    """Verifies trees that the host has named."""
