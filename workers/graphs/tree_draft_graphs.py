"""A rank's trees of drafts as CUDA graphs: all passes of a drafter in one, a pass a depth.

A step replays the smallest graph that holds it, as in draft_graphs.py. A row whose tree is narrower
than the graph's, or a chain, has the first drafts of each depth; those that fill it up are
nobody's, and no draft of the row's stands behind them. Which stands behind which is made within the
graph.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from attention.backends.base import GraphAttentionBackend
from attention.forward_batch import ForwardBatch, ForwardMode, StepShape
from workers.graphs.decode_graphs import GraphCapturer
from workers.graphs.draft_graphs import DraftGraphs
from workers.graphs.draft_rows import SLOTS, DrawnRows, RowKernels
from workers.sampling.transfer import upload
from workers.scheduler.plan import IntArray
from workers.speculation.ahead import AheadRows
from workers.speculation.device_growth import TreeDrafter, grow_trees, visibility_of
from workers.speculation.device_step import DeviceDrafts, DrafterStep
from workers.speculation.device_tree import DeviceTrees
from workers.speculation.runs import ranges
from workers.speculation.tree_levels import TreeLevel, tree_levels
from workers.speculation.tree_shape import level_depths


class TreeDraftGraphs(DraftGraphs):
    """As DraftGraphs. backend: one that captures_verify. shapes: rows of one token, or of a whole
    tree. tree: drafts at each depth; a row has as many or fewer."""

    _drafter: TreeDrafter

    def __init__(
        self,
        drafter: TreeDrafter,
        backend: GraphAttentionBackend,
        capturer: GraphCapturer,
        shapes: Sequence[StepShape],
        padding_slot: int,
        kernels: RowKernels,
        tree: Sequence[int],
    ) -> None:
        super().__init__(drafter, backend, capturer, shapes, padding_slot, kernels)
        self._tree = tuple(tree)
        (self._depths,) = upload([np.array(level_depths(tree))], backend.config.device)
        self._levels = tree_levels(tree, len(self._static.drafts), backend.config.device)
        self._firsts = _firsts(np.array([[1, *tree]], dtype=np.int64))[0]
        # How many rows of the widths below are known to be the tree's.
        self._num_whole = 0
        # Of the rows under way: drafts at each depth, and what each stands behind.
        size = len(self._static.drafts), len(tree)
        self._widths = torch.zeros(size, dtype=torch.int64, device=backend.config.device)
        self._parents = torch.zeros_like(self._static.drafts)
        (self._whole,) = upload([np.array(tree, dtype=np.int64)], backend.config.device)

    def run_ahead(self, ahead: AheadRows, drawn: DrawnRows) -> DeviceDrafts:
        """Of whole trees."""
        self._make_whole(ahead.plan.batch_size)
        made = super().run_ahead(ahead, drawn)
        return self._with_parents(made)

    def run(self, step: DrafterStep) -> DeviceDrafts:
        if self._is_whole(step):
            return self._with_parents(super().run(step))
        made = super().run(step)
        # Within the graph a row's tokens stand apart where its tree is narrower.
        places = step.places - self._drafter.first_position
        self._table[step.token_slots, places] = step.out_cache_loc.int()
        return self._of_runs(step) if len(step.runs) else made

    def _is_whole(self, step: DrafterStep) -> bool:
        """Whether all rows have the graph's tree: then their tokens stand as in the graph."""
        runs, num_drafts = step.runs, sum(self._tree)
        is_even = len(runs) == step.plan.batch_size and runs.is_even
        return is_even and step.trees is not None and runs.width == num_drafts

    def _with_parents(self, made: DeviceDrafts) -> DeviceDrafts:
        """Of the whole trees that a replay has left."""
        n, num_drafts = made.token_ids.shape
        own = self._parents[:n, :num_drafts].clone(memory_format=torch.contiguous_format)
        return DeviceDrafts(made.token_ids, own)

    def _make_whole(self, num_rows: int) -> None:
        if self._num_whole < num_rows:
            self._widths[:num_rows].copy_(self._whole.expand(num_rows, -1))
            self._num_whole = num_rows

    def _of_runs(self, step: DrafterStep) -> DeviceDrafts:
        """Each row's own of what a replay has left, one behind the other."""
        runs, depths = step.runs, self._depths_of(step)
        filled = np.arange(runs.width) < runs.num_drafts[:, None]
        tokens = (runs.firsts[:, None] + 1 + np.arange(runs.width))[filled]
        of_rows = np.repeat(runs.rows, runs.num_drafts)
        cells, shifts = np.zeros((2, len(runs), runs.width), dtype=np.int64)
        columns = self._columns(step)[tokens] - 1
        cells[filled] = of_rows * self._static.drafts.shape[1] + columns
        # A parent is known by its column; it is of the depth before, which begins elsewhere there.
        before = depths[tokens] - 1
        begins = _firsts(self._widths_of(step))[of_rows, before]
        shifts[filled] = begins - self._firsts[before]
        at, to_rows = upload([cells, shifts], self._parents.device)
        token_ids = self._static.drafts.view(-1)[at]
        return DeviceDrafts(token_ids, self._parents.view(-1)[at] + to_rows)

    def _passes(self, shape: StepShape) -> torch.Tensor:
        if shape.tokens_per_row == 1:
            return super()._passes(shape)
        static, n, num_drafts = self._static, shape.rows, shape.tokens_per_row - 1
        roots, carried = self._begin(shape)
        widths = self._widths[:n]
        trees = grow_trees(self._drafter, roots, carried, self._levels, self._prepare, widths)
        if self._drafter.reads_last:
            batch = self._prepare(trees, self._levels[-1])
            self._drafter.read(batch.input_ids, batch)
        static.drafts[:n, :num_drafts].copy_(trees.token_ids)
        self._parents[:n, :num_drafts].copy_(trees.parents[:, 1:])
        return static.drafts

    def _prepare(self, trees: DeviceTrees, level: TreeLevel) -> ForwardBatch:
        """Of a pass over trees so far, within a graph. Host copies are placeholders."""
        static, (n, num_tokens) = self._static, trees.parents.shape
        lens_cpu = np.full(n, num_tokens, dtype=np.int32)
        is_decode = num_tokens == 1
        # A pass over k tokens leaves as many keys as the kth pass of a chain.
        passes = static.passes(num_tokens, n)
        positions = passes.positions[0].unsqueeze(1) + self._depths[:num_tokens]
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE if is_decode else ForwardMode.TARGET_VERIFY,
            batch_size=n,
            num_tokens=n * num_tokens,
            input_ids=trees.ids.view(-1),
            positions=positions.view(-1),
            req_pool_indices=static.of_rows(n)[SLOTS],
            seq_lens=passes.seq_lens[-1],
            extend_seq_lens=level.num_new[:n],
            extend_prefix_lens=passes.prefix_lens[0],
            out_cache_loc=passes.places.t().reshape(-1),
            seq_lens_cpu=lens_cpu,
            extend_seq_lens_cpu=lens_cpu,
            extend_prefix_lens_cpu=np.zeros_like(lens_cpu),
            attn_backend=self._backend,
            is_captured=True,
            visibility=visibility_of(trees, level),
        )
        self._backend.init_forward_metadata_capture_cuda_graph(batch)
        self._backend.record_step_tables(batch)
        return batch

    def _stage(self, shape: StepShape, step: DrafterStep) -> None:
        super()._stage(shape, step)
        if self._is_whole(step):
            self._make_whole(step.plan.batch_size)
            return
        self._num_whole = 0
        own = np.zeros((shape.rows, len(self._tree)), dtype=np.int64)
        own[: step.plan.batch_size] = self._widths_of(step)[:, 1:]
        (widths,) = upload([own], self._widths.device)
        self._widths[: shape.rows].copy_(widths)

    def _place(self, places: npt.NDArray[np.int64], step: DrafterStep) -> None:
        if self._is_whole(step):
            super()._place(places, step)
            return
        num_new = step.plan.num_new_tokens
        rows = np.repeat(np.arange(len(num_new)), num_new)
        places[self._columns(step), rows] = step.plan.out_cache_loc

    def _columns(self, step: DrafterStep) -> npt.NDArray[np.int64]:
        """Which of a row's tokens in the graph each of the step's is, int64 (num_tokens,)."""
        depths, num_new = self._depths_of(step), step.plan.num_new_tokens
        of_rows = np.repeat(np.arange(len(num_new)), num_new)
        in_row = _in_row(num_new)
        own_firsts = _firsts(self._widths_of(step))
        columns: npt.NDArray[np.int64] = self._firsts[depths] + in_row - own_firsts[of_rows, depths]
        return columns

    def _depths_of(self, step: DrafterStep) -> IntArray:
        """Of the step's tokens, int32 (num_tokens,)."""
        if step.trees is not None:
            return step.trees.shape.depths
        return _in_row(step.plan.num_new_tokens).astype(np.int32)

    def _widths_of(self, step: DrafterStep) -> npt.NDArray[np.int64]:
        """Tokens of each row at each depth, its root's as well: int64 (bs, 1 + depths)."""
        num_new, num_depths = step.plan.num_new_tokens, 1 + len(self._tree)
        of_rows = np.repeat(np.arange(len(num_new)), num_new)
        cells = of_rows * num_depths + self._depths_of(step)
        counts = np.bincount(cells, minlength=len(num_new) * num_depths)
        return counts.astype(np.int64).reshape(len(num_new), num_depths)


def _in_row(num_new: IntArray) -> npt.NDArray[np.int64]:
    """Where in its row each token stands, int64 (num_tokens,). num_new: of each row."""
    return ranges(np.zeros_like(num_new), num_new)


def _firsts(widths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Where in a row its tokens of each depth begin, of the same shape."""
    return np.cumsum(widths, axis=1) - widths
