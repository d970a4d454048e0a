"""Trees of drafts by a head on a rank's device, as pair_tree.py makes them on the host."""

import torch

from attention.backends.base import AttentionBackend
from attention.forward_batch import ForwardBatch
from workers.speculation.device_growth import draft_trees
from workers.speculation.device_pairs import DevicePairs
from workers.speculation.device_step import DeviceDrafts, DrafterStep
from workers.speculation.pairs import PairHead
from workers.speculation.step_trees import LinedUp, StepTrees
from workers.speculation.tree_kernels import TreeKernels

_PARTS = 16
"""Of a state, moved one after the other where memory lacks."""


class DevicePairTree(DevicePairs):
    """As DeviceTreeDrafter; steps without trees as DevicePairs. Of a tree, too, the pairs of all
    tokens are read behind the target's pass: a token with the target's state of its parent."""

    def __init__(
        self,
        head: PairHead,
        backend: AttentionBackend,
        table: torch.Tensor,
        states: torch.Tensor,
        kernels: TreeKernels,
    ) -> None:
        super().__init__(head, backend, table, states)
        self.kernels = kernels

    def propose(self, step: DrafterStep) -> DeviceDrafts:
        if step.trees is None:
            return super().propose(step)
        return draft_trees(self, self._passes, step, step.trees)

    def _before(self, step: DrafterStep) -> tuple[torch.Tensor, torch.Tensor]:
        """Of a draft of a tree its parent."""
        trees = step.trees
        if trees is None:
            return super()._before(step)
        own = step.positions, step.places, step.token_slots, step.out_cache_loc
        return self.kernels.before(trees, *own, self._table)

    def read_tree(
        self, ids: torch.Tensor, carried: torch.Tensor, batch: ForwardBatch, newest: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As TreeDrafter.read_tree: the head's own states go with its drafts."""
        made = self._head(ids, carried, batch)
        return self._head.logits(made.index_select(0, newest)), made

    @property
    def names(self) -> torch.Tensor | None:
        """As TreeDrafter.names."""
        return self._head.names

    def line_up(self, trees: StepTrees, lined: LinedUp, targets: torch.Tensor) -> None:
        """As DeviceTreeDrafter.line_up."""
        self._pool.line_up(lined.sources, targets, trees.starts, lined.run_lens)
        try:
            read = self._states.index_select(0, lined.sources)
        except torch.OutOfMemoryError:
            # The step has been sampled, and must not run again. Nothing has been written.
            for part in self._states.tensor_split(_PARTS, dim=1):
                part.index_copy_(0, targets, part.index_select(0, lined.sources))
        else:
            self._states.index_copy_(0, targets, read)
