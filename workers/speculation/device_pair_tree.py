"""Trees of drafts by a head on a rank's device, as pair_tree.py makes them on the host."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch

from attention.forward_batch import ForwardBatch
from workers.speculation.device_growth import draft_trees
from workers.speculation.device_pairs import DevicePairs
from workers.speculation.device_pass import PassRows
from workers.speculation.device_step import DeviceDrafts, DrafterStep


class DevicePairTree(DevicePairs):
    """As DeviceTreeDrafter; steps without trees as DevicePairs. Of a tree, too, the pairs of all
    tokens are read behind the target's pass: a token with the target's state of its parent."""

    def propose(self, step: DrafterStep) -> DeviceDrafts:
        if step.trees is None:
            return super().propose(step)
        return draft_trees(self, self._passes, step, step.trees)

    def _prepare(
        self, step: DrafterStep, rows: PassRows, kept: npt.NDArray[np.int64], ids: torch.Tensor
    ) -> ForwardBatch:
        trees = step.trees
        if trees is None:
            return super()._prepare(step, rows, kept, ids)
        # In a step with trees, a row without a prefix has one token, which has no pair.
        depths = trees.shape.depths[np.isin(trees.of_tokens, kept)]
        return self._passes.prepare(replace(rows, depths=depths), ids, trees.visibility(kept))

    def _states_before(self, step: DrafterStep, tokens: torch.Tensor) -> torch.Tensor:
        """Of a draft of a tree that of its parent."""
        if step.trees is None:
            return super()._states_before(step, tokens)
        parents = step.trees.parents.index_select(0, tokens)
        slots = step.token_slots.index_select(0, tokens)
        places = step.places.index_select(0, tokens) - 1
        before = torch.where(
            parents == tokens,
            self._table[slots, places].long(),
            step.out_cache_loc.index_select(0, parents),
        )
        return self._states.index_select(0, before)

    def read_tree(
        self, ids: torch.Tensor, carried: torch.Tensor, batch: ForwardBatch, newest: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As TreeDrafter.read_tree: the head's own states go with its drafts."""
        made = self._head(ids, carried, batch)
        return self._head.logits(made.index_select(0, newest)), made

    def named(self, columns: torch.Tensor) -> torch.Tensor:
        """As TreeDrafter.named."""
        return self._head.named(columns)

    def move_tokens(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """As DeviceTreeDrafter.move_tokens."""
        self._pool.move_tokens(sources, targets)
        self._states.index_copy_(0, targets, self._states.index_select(0, sources))
