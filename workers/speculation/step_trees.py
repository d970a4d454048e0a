"""Trees of a step whose drafts a rank's device makes: of a token's parent the host knows the depth.

Operations depend on what the host knows alone: nothing here waits for the device.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch

from attention.visibility import Tree
from workers.sampling.transfer import upload
from workers.scheduler.plan import IntArray, StepPlan
from workers.scheduler.plan_tree import PlanTrees
from workers.speculation.runs import ranges
from workers.speculation.tree import HeldPaths, held_paths


class LinedUp(NamedTuple):
    """What holds of a step's rows, first of all in each. run_lens: int64 (bs,), how many samples of
    each row hold. Of the step's tokens, int64 (num_tokens,): sources, where in KV memory lies what
    is to stand at each one's place, that place itself behind those that hold; samples, any behind
    those that hold."""

    run_lens: torch.Tensor
    sources: torch.Tensor
    samples: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepTrees:
    """shape: of the plan, right but for rows, paths and parents. num_new: host int32 (bs,), new
    tokens of each row. parents: int64 (num_tokens,) on the device, which token of the step each
    stands behind, a root itself; any of the depth before until drafts are named. starts: int64 (bs
    + 1,) there, each row's first token, and how many there are."""

    shape: PlanTrees
    num_new: IntArray
    parents: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, plan: StepPlan, places: IntArray, device: torch.device) -> Self:
        """Of a plan with trees. places: as in PlanTrees.of."""
        return cls.of_shape(PlanTrees.of(plan, places), plan.num_new_tokens, device)

    @classmethod
    def of_shape(cls, shape: PlanTrees, num_new: IntArray, device: torch.device) -> Self:
        starts = np.append(np.int64(0), np.cumsum(num_new, dtype=np.int64))
        return cls(shape, num_new, *upload([shape.parents, starts], device))

    def widths(self, row: int) -> tuple[int, ...]:
        """Drafts at each depth of a row."""
        first = int(self.num_new[:row].sum())
        own = self.shape.depths[first : first + int(self.num_new[row])]
        return tuple(np.bincount(own)[1:].tolist())

    def visibility(self) -> Tree:
        """Of a batch of the step's rows."""
        num_new, widest = self.num_new, int(self.num_new.max())
        starts = np.cumsum(num_new, dtype=np.int64) - num_new
        tokens = np.arange(int(num_new.sum()))
        sizes = num_new**2
        of_tokens, cells, first_cells = upload(
            [
                np.repeat(starts, num_new),
                ranges(tokens * widest, np.repeat(num_new, num_new)),
                np.cumsum(sizes, dtype=np.int32) - sizes,
            ],
            self.parents.device,
        )
        sees = sees_ancestors(self.parents, of_tokens, widest)
        return Tree(sees.view(-1).index_select(0, cells), first_cells)

    def held(self, sampled: torch.Tensor, ids: torch.Tensor) -> HeldPaths:
        """sampled, ids: int64 (num_tokens,), what was drawn behind each of the step's tokens, and
        what these are."""
        return held_paths(sampled, ids, self.num_new, self.parents, self.shape.depths)


def hold_paths(
    trees: StepTrees, sampled: torch.Tensor, ids: torch.Tensor, cache_indices: torch.Tensor
) -> LinedUp:
    """What tree_kernels.HoldPaths says, in plain torch."""
    run_lens, order = trees.held(sampled, ids)
    rows, in_row = upload(
        [
            np.repeat(np.arange(len(trees.num_new)), trees.num_new),
            ranges(np.zeros_like(trees.num_new), trees.num_new),
        ],
        ids.device,
    )
    is_held = in_row < run_lens[rows]
    sources = torch.where(is_held, cache_indices[order], cache_indices)
    return LinedUp(run_lens, sources, sampled[order])


def sees_ancestors(parents: torch.Tensor, firsts: torch.Tensor, widest: int) -> torch.Tensor:
    """Which tokens of its row each sees, those before it on its path and itself: bool (n, widest).

    parents: int64 (n,), a root itself. firsts: int64 (n,), the first token of each one's row, of at
    most widest tokens: trees of any depth, chains included. What a token sees doubles with every
    pass (pointer jumping, Wyllie, 1979).
    """
    own = torch.arange(len(parents), device=parents.device)
    columns = torch.arange(widest, device=parents.device)
    sees, above = (own - firsts).unsqueeze(1) == columns, parents
    for _ in range((widest - 1).bit_length()):
        sees, above = sees | sees[above], above[above]
    return sees
