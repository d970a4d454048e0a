"""Trees of drafts that a rank makes on its device, as the host that plans steps sees them."""

from collections.abc import Sequence

import numpy as np
import torch

from workers.scheduler.plan import DRAFT_TOKEN
from workers.speculation.proposer import DraftRows, Drafts
from workers.speculation.rank_proposer import RankProposer
from workers.speculation.tree_shape import fitted, level_parents


class RankTreeProposer(RankProposer):
    """Says how many drafts there are at each depth. Which they are, and which of the depth before
    each stands behind, is left to the rank: its parent here is the first of that depth.

    tree: drafts at each depth.
    """

    def __init__(self, tree: Sequence[int]) -> None:
        self._tree = tuple(tree)

    def propose(self, rows: DraftRows) -> Drafts:
        """Rows that may not branch have a draft at each depth."""
        chain = (1,) * len(self._tree)
        num_rows = len(rows.slots)
        branches = [False] * num_rows if rows.may_branch is None else rows.may_branch.tolist()
        shapes = [
            fitted(self._tree if may_branch else chain, most)
            for may_branch, most in zip(branches, rows.max_drafts.tolist(), strict=True)
        ]
        token_ids = torch.full((num_rows, rows.width), DRAFT_TOKEN, dtype=torch.int64)
        parents = np.zeros((num_rows, rows.width), dtype=np.int32)
        for own, widths in zip(parents, shapes, strict=True):
            own[: sum(widths)] = level_parents(widths)
        num_drafts = np.array([sum(widths) for widths in shapes], dtype=np.int32)
        has_branches = any(max(widths) > 1 for widths in shapes)
        return Drafts(token_ids, num_drafts, parents if has_branches else None)
