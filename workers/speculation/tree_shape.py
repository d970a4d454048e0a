"""How many drafts a tree has at each depth, and a tree that grows by what is likeliest.

After EAGLE-2 (Li et al., 2024): of all continuations of a depth's drafts those are kept that are
likeliest together with the drafts before them, whoever's they are. Knows no model and no text.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from workers.scheduler.plan import IntArray
from workers.speculation.proposer import DraftRows, Drafts


def fitted(widths: Sequence[int], most: int) -> tuple[int, ...]:
    """Of a tree of widths[i] drafts at depth i + 1, as much as most drafts allow: the same cap on
    all depths, and a chain cut short where even that is too much. most: at least 1."""
    if sum(widths) <= most:
        return tuple(widths)
    caps = range(max(widths), 0, -1)
    capped = ([min(width, cap) for width in widths] for cap in caps)
    narrowed = next((some for some in capped if sum(some) <= most), [1] * most)
    return tuple(narrowed)


def growing_trees(widths: Sequence[int], rows: DraftRows) -> list["GrowingTree"]:
    """One for each row, of a single draft a depth where it may not branch."""
    chain = (1,) * len(widths)
    branches = [False] * len(rows.slots) if rows.may_branch is None else rows.may_branch.tolist()
    return [
        GrowingTree(fitted(widths if may_branch else chain, most))
        for may_branch, most in zip(branches, rows.max_drafts.tolist(), strict=True)
    ]


def level_depths(widths: Sequence[int]) -> list[int]:
    """How many of its row stand before each token of a tree, its root first: positions are these
    behind the root's."""
    return [0, *(depth for depth, width in enumerate(widths, 1) for _ in range(width))]


def level_parents(widths: Sequence[int]) -> list[int]:
    """Of a tree's drafts, as in Drafts, where only the shape is known: each behind the first draft
    of the depth before."""
    firsts = [0, *accumulate(widths, initial=1)]
    return [firsts[depth] for depth, width in enumerate(widths) for _ in range(width)]


@dataclass(frozen=True, slots=True, eq=False)
class Continuations:
    """What may follow drafts of one depth, in order of preference where it is as likely. parents:
    int32 (n,), as in Drafts. token_ids: int64 (n,). logprobs: float64 (n,), of each with all before
    it."""

    parents: IntArray
    token_ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float64]


@dataclass(slots=True)
class GrowingTree:
    """Drafts of one row, level by level. widths: of its levels. The lists are parallel: what each
    draft is, which of the row's new tokens it stands behind, and how likely it is with all before
    it."""

    widths: tuple[int, ...]
    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    num_levels: int = 0
    # The new tokens of the row that the last level is made of: the root at first.
    newest: range = range(1)

    @property
    def is_full(self) -> bool:
        return self.num_levels == len(self.widths)

    def newest_logprobs(self) -> npt.NDArray[np.float64]:
        """float64 (len(newest),)."""
        return np.array([0.0, *self.logprobs])[self.newest.start : self.newest.stop]

    def grow(self, found: Continuations) -> npt.NDArray[np.int64]:
        """One level, of the likeliest of what was found: which of these it is made of, in order."""
        best = np.argsort(-found.logprobs, kind="stable")[: self.widths[self.num_levels]]
        self.newest = range(self.newest.stop, self.newest.stop + len(best))
        self.token_ids += found.token_ids[best].tolist()
        self.parents += found.parents[best].tolist()
        self.logprobs += found.logprobs[best].tolist()
        self.num_levels += 1
        return best


def joined(trees: Sequence[GrowingTree], width: int) -> Drafts:
    """Of all rows. width: of the most drafts that a row may have."""
    token_ids = np.zeros((len(trees), width), dtype=np.int64)
    parents = np.zeros((len(trees), width), dtype=np.int32)
    num_drafts = np.array([len(tree.token_ids) for tree in trees], dtype=np.int32)
    for row, tree in enumerate(trees):
        token_ids[row, : num_drafts[row]] = tree.token_ids
        parents[row, : num_drafts[row]] = tree.parents
    has_branches = any(max(tree.widths) > 1 for tree in trees)
    return Drafts(torch.from_numpy(token_ids), num_drafts, parents if has_branches else None)
