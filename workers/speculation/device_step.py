"""A step as a drafter on a rank's device sees it: its tokens, and its rows that want drafts.

Plans say true lengths and places; only tokens may be unknown to the host. Nothing here waits for
the device.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch

from workers.sampling.state import SamplingState
from workers.sampling.transfer import upload
from workers.scheduler.plan import DRAFT_TOKEN, IntArray, StepPlan
from workers.speculation.runs import ranges
from workers.speculation.step_trees import StepTrees


class DeviceDrafts(NamedTuple):
    """Of some rows, int64 (n, width) on the device; what stands behind a row's own is any. parents:
    as in Drafts, of trees; None where nobody has chosen any, or of chains."""

    token_ids: torch.Tensor
    parents: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class RunRows:
    """Rows whose drafts are to be made, host arrays. rows: int64 (n,), which of the plan's. slots,
    prefix_lens, num_drafts: int32 (n,); the token sampled last stands behind the prefix. firsts:
    int64 (n,), where among the step's tokens each row begins."""

    rows: npt.NDArray[np.int64]
    slots: IntArray
    prefix_lens: IntArray
    num_drafts: IntArray
    firsts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        starts = np.cumsum(plan.num_new_tokens, dtype=np.int64) - plan.num_new_tokens
        num_drafts = np.add.reduceat(plan.input_ids == DRAFT_TOKEN, starts, dtype=np.int32)
        rows = np.flatnonzero(num_drafts)
        own = plan.slots[rows], plan.prefix_lens[rows], num_drafts[rows]
        return cls(rows, *own, starts[rows])

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        """Of the row with the most drafts."""
        return int(self.num_drafts.max(initial=0))

    @property
    def is_even(self) -> bool:
        """Whether all rows want as many."""
        return bool((self.num_drafts == self.width).all())


@dataclass(frozen=True, slots=True)
class DrafterStep:
    """plan: as it runs. runs: of it. ids, token_slots, places, out_cache_loc: int64 (num_tokens,)
    on the device, of its new tokens; where drafts are to stand, ids are any until name fills them
    in. places: as in PlanTrees. trees: None where all drafts stand one behind the other."""

    plan: StepPlan
    runs: RunRows
    ids: torch.Tensor
    token_slots: torch.Tensor
    places: torch.Tensor
    out_cache_loc: torch.Tensor
    trees: StepTrees | None

    @classmethod
    def of(cls, plan: StepPlan, sampling: SamplingState, table: torch.Tensor) -> Self:
        """The table, int32 (num_slots, max_context_len), learns where the tokens go. What the plan
        admits, clears and writes to it has been done."""
        token_slots = np.repeat(plan.slots, plan.num_new_tokens)
        on_host = ranges(plan.prefix_lens, plan.num_new_tokens)
        own = (plan.input_ids, token_slots, on_host, plan.out_cache_loc)
        ids, slots, places, locs = upload([one.astype(np.int64) for one in own], table.device)
        table[slots, places] = locs.int()
        trees = None
        if plan.has_trees:
            trees = StepTrees.of(plan, on_host.astype(np.int32), table.device)
        return cls(plan, RunRows.of(plan), sampling.resolve(ids, slots), slots, places, locs, trees)

    def name(self, drafts: DeviceDrafts) -> None:
        """Of the runs."""
        runs = self.runs
        columns = np.arange(drafts.token_ids.shape[1])
        filled = columns < runs.num_drafts[:, None]
        places = (runs.firsts[:, None] + 1 + columns)[filled]
        firsts = np.repeat(runs.firsts, runs.num_drafts)
        targets, sources, roots = upload(
            [places, np.flatnonzero(filled), firsts], drafts.token_ids.device
        )
        self.ids.index_copy_(0, targets, drafts.token_ids.reshape(-1).index_select(0, sources))
        if self.trees is not None and drafts.parents is not None:
            own = drafts.parents.reshape(-1).index_select(0, sources)
            self.trees.parents.index_copy_(0, targets, roots + own)
