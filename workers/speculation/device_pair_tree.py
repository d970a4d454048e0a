"""Trees of drafts by a head on a rank's device, as pair_tree.py makes them on the host."""

import torch

from attention.forward_batch import ForwardBatch
from workers.speculation.device_growth import draft_trees
from workers.speculation.device_pairs import DevicePairs
from workers.speculation.device_step import DeviceDrafts, DrafterStep


class DevicePairTree(DevicePairs):
    """As DeviceTreeDrafter; steps without trees as DevicePairs. Of a tree, too, the pairs of all
    tokens are read behind the target's pass: a token with the target's state of its parent."""

    def propose(self, step: DrafterStep) -> DeviceDrafts:
        if step.trees is None:
            return super().propose(step)
        return draft_trees(self, self._passes, step, step.trees)

    def _indices_before(self, step: DrafterStep, before: torch.Tensor) -> torch.Tensor:
        """Of a draft of a tree that of its parent."""
        if step.trees is None:
            return super()._indices_before(step, before)
        parents, own = step.trees.parents, torch.arange(len(step.ids), device=step.ids.device)
        places = (step.places - 1).clamp_(min=0)
        return torch.where(
            parents == own,
            self._table[step.token_slots, places].long(),
            step.out_cache_loc.index_select(0, parents),
        )

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
