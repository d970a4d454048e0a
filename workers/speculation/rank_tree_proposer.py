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
        shapes = tuple(tree), (1,) * len(tree)
        # Of rows that may branch and of others, by the most drafts of a row.
        self._parents = tuple(
            [level_parents(fitted(shape, most)) for most in range(1, sum(shape) + 1)]
            for shape in shapes
        )

    def propose(self, rows: DraftRows) -> Drafts:
        """Rows that may not branch have a draft at each depth."""
        num_rows = len(rows.slots)
        branches = [False] * num_rows if rows.may_branch is None else rows.may_branch.tolist()
        found = [
            self._parents[not may_branch][min(most, len(self._parents[not may_branch])) - 1]
            for may_branch, most in zip(branches, rows.max_drafts.tolist(), strict=True)
        ]
        token_ids = torch.full((num_rows, rows.width), DRAFT_TOKEN, dtype=torch.int64)
        parents = np.zeros((num_rows, rows.width), dtype=np.int32)
        for own, of_row in zip(parents, found, strict=True):
            own[: len(of_row)] = of_row
        num_drafts = np.array(list(map(len, found)), dtype=np.int32)
        # Of a chain each draft stands behind another one.
        has_branches = any(len({*of_row}) < len(of_row) for of_row in found)
        return Drafts(token_ids, num_drafts, parents if has_branches else None)
