"""Drafts that are made before the host knows what holds of the step before.

Plans are scheduled a step ahead: their lengths are upper bounds, and their cache indices suffice
for whatever holds. What does is found out on the device, from the samples and the drafts that are
there; lengths, last tokens and cache indices follow. So the device goes on from samples to drafts
while the host takes the samples in. Nothing here waits for the device.
"""

from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from attention.forward_batch import RAGGED, ForwardMode
from workers.scheduler.plan import LAST_SAMPLED_TOKEN, IntArray, StepPlan


@dataclass(frozen=True, slots=True)
class AheadRows:
    """Rows of a plan that go on from those of the step before, all of whose rows verify as many
    drafts; the plan's rows, too, have as many each.

    plan: as it was scheduled. rows: int64 (bs,), which of the step before's each goes on from.
    prefix_lens: int32 (bs,), how long these were before that step, which is exact.
    """

    plan: StepPlan
    rows: npt.NDArray[np.int64]
    prefix_lens: IntArray

    @classmethod
    def of(cls, plan: StepPlan, before: StepPlan, runs: "AheadRuns") -> Self | None:
        """before: the step before, as it runs. None where drafts have to wait for its samples."""
        num_before, num_tokens = runs.tokens_before(before), runs.tokens_a_row(plan)
        # Samples that wait for masks have not been launched, nor has what the plan does to memory.
        if not (num_before and num_tokens) or before.has_masks or _changes_memory(plan):
            return None
        row_of = {slot: row for row, slot in enumerate(before.slots.tolist())}
        found = [row_of.get(slot, -1) for slot in plan.slots.tolist()]
        rows = np.array(found, dtype=np.int64)
        firsts = plan.input_ids[::num_tokens]
        if rows.min() < 0 or (firsts != LAST_SAMPLED_TOKEN).any():
            return None
        prefix_lens = before.prefix_lens[rows]
        if (plan.prefix_lens != prefix_lens + num_before).any():
            return None
        return cls(plan, rows, prefix_lens)

    @property
    def tokens_a_row(self) -> int:
        """Of the plan: the one sampled last and its drafts."""
        return len(self.plan.input_ids) // self.plan.batch_size


class AheadRuns(Protocol):
    """Which steps' drafts may be made ahead."""

    def tokens_before(self, plan: StepPlan) -> int:
        """Of each row of a step as it runs, behind which drafts may be made; 0 of others."""
        ...

    def tokens_a_row(self, plan: StepPlan) -> int:
        """Of a plan as it was scheduled, whose drafts may be made; 0 of others."""
        ...


class ChainsAhead:
    """Of as many drafts in each row, one behind the other."""

    def tokens_before(self, plan: StepPlan) -> int:
        """See AheadRuns."""
        return 0 if plan.has_trees else _tokens_a_row(plan)

    def tokens_a_row(self, plan: StepPlan) -> int:
        """See AheadRuns."""
        return self.tokens_before(plan)


@dataclass(frozen=True, slots=True)
class TreesAhead:
    """Of a whole tree in each row: a row of as many tokens has one wherever it may branch.
    num_drafts: of a tree."""

    num_drafts: int

    def tokens_before(self, plan: StepPlan) -> int:
        """See AheadRuns."""
        return self._whole(plan) if plan.has_trees else 0

    def tokens_a_row(self, plan: StepPlan) -> int:
        """See AheadRuns. A plan gets its parents once it is launched."""
        return 0 if plan.has_masks else self._whole(plan)

    def _whole(self, plan: StepPlan) -> int:
        num_tokens = _tokens_a_row(plan)
        return num_tokens if num_tokens == 1 + self.num_drafts else 0


def _tokens_a_row(plan: StepPlan) -> int:
    """Of a step all of whose rows verify as many drafts; 0 of others."""
    shape = plan.shape
    is_run = shape.mode is ForwardMode.TARGET_VERIFY
    return shape.tokens_per_row if is_run and shape.tokens_per_row != RAGGED else 0


def _changes_memory(plan: StepPlan) -> bool:
    """Whether it has to be done before the plan's rows are read or written."""
    return bool(plan.admitted or plan.table_writes or len(plan.cleared))
