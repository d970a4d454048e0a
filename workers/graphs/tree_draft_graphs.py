"""A rank's trees of drafts as CUDA graphs: all passes of a drafter in one, a pass a depth.

A step replays the smallest graph that holds it if each of its rows has a whole tree or no drafts.
Which draft stands behind which is made within the graph.
"""

from collections.abc import Sequence

import numpy as np
import torch

from attention.backends.base import GraphAttentionBackend
from attention.forward_batch import ForwardBatch, ForwardMode, StepShape
from workers.graphs.decode_graphs import GraphCapturer
from workers.graphs.draft_graphs import FIRST_PLACES, SLOTS, DraftGraphs
from workers.sampling.transfer import upload
from workers.scheduler.plan import StepPlan
from workers.speculation.device_growth import TreeDrafter, grow_trees, visibility_of
from workers.speculation.device_step import DeviceDrafts, DrafterStep
from workers.speculation.device_tree import DeviceTrees
from workers.speculation.tree_shape import level_depths


class TreeDraftGraphs(DraftGraphs):
    """As DraftGraphs. backend: one that captures_verify. shapes: rows of one token, or of a whole
    tree. tree: drafts at each depth."""

    _drafter: TreeDrafter

    def __init__(
        self,
        drafter: TreeDrafter,
        backend: GraphAttentionBackend,
        capturer: GraphCapturer,
        shapes: Sequence[StepShape],
        padding_slot: int,
        tree: Sequence[int],
    ) -> None:
        super().__init__(drafter, backend, capturer, shapes, padding_slot)
        self._tree = tuple(tree)
        (self._depths,) = upload([np.array(level_depths(tree))], backend.config.device)
        self._parents = torch.zeros_like(self._static.drafts)

    def run(self, step: DrafterStep) -> DeviceDrafts:
        token_ids, _ = super().run(step)
        (rows,) = upload([step.runs.rows], self._parents.device)
        return DeviceDrafts(token_ids, self._parents[:, : step.runs.width].index_select(0, rows))

    def _passes(self, shape: StepShape, batch: ForwardBatch) -> torch.Tensor:
        if shape.tokens_per_row == 1:
            return super()._passes(shape, batch)
        static, n, num_drafts = self._static, shape.rows, shape.tokens_per_row - 1
        self._begin(shape)
        roots = static.ids[:n]
        trees = grow_trees(self._drafter, roots, static.carried[:n], self._tree, self._prepare)
        if self._drafter.reads_last:
            ids = torch.cat([roots.unsqueeze(1), trees.token_ids], dim=1).view(-1)
            self._drafter.read(ids, self._prepare(trees, ids))
        static.drafts[:n, :num_drafts].copy_(trees.token_ids)
        self._parents[:n, :num_drafts].copy_(trees.parents[:, 1:])
        return static.drafts

    def _prepare(self, trees: DeviceTrees, ids: torch.Tensor) -> ForwardBatch:
        """Of a pass over trees so far, within a graph. Host copies are placeholders."""
        static, (n, num_tokens) = self._static, trees.parents.shape
        lens_cpu = np.full(n, num_tokens, dtype=np.int32)
        is_decode = num_tokens == 1
        positions = static.positions[:n].unsqueeze(1) + self._depths[:num_tokens]
        places = static.staged[FIRST_PLACES : FIRST_PLACES + num_tokens, :n]
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.TARGET_VERIFY,
            batch_size=n,
            num_tokens=n * num_tokens,
            input_ids=ids,
            positions=positions.view(-1),
            req_pool_indices=static.staged[SLOTS, :n],
            seq_lens=static.prefix_lens[:n] + static.is_row[:n] * num_tokens,
            extend_seq_lens=static.ones[:n] * num_tokens,
            extend_prefix_lens=static.prefix_lens[:n],
            out_cache_loc=places.t().reshape(-1),
            seq_lens_cpu=lens_cpu,
            extend_seq_lens_cpu=lens_cpu,
            extend_prefix_lens_cpu=np.zeros_like(lens_cpu),
            attn_backend=self._backend,
            is_captured=True,
            visibility=visibility_of(trees),
        )
        self._backend.init_forward_metadata_capture_cuda_graph(batch)
        self._backend.record_step_tables(batch)
        return batch

    def _shape_for(self, plan: StepPlan) -> StepShape | None:
        shape = super()._shape_for(plan)
        if shape is None or shape.tokens_per_row == 1:
            return shape
        is_whole = np.isin(plan.num_new_tokens, (1, shape.tokens_per_row)).all()
        has_shape = plan.has_trees or max(self._tree) == 1
        return shape if is_whole and has_shape else None
