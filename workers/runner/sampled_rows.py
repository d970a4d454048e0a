"""Samples of a step, and which of them hold: from its plan and its result, on the host.

All that a plan says of its samples is worked out before the device has drawn them: somebody waits
for these, with the next step to launch.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from workers.scheduler.plan import IntArray, StepPlan, StepResult
from workers.scheduler.plan_tree import PlanTrees
from workers.speculation.runs import ranges
from workers.speculation.tree import TreeVerifier
from workers.speculation.verifier import Verifier


@dataclass(frozen=True, slots=True)
class AskedSamples:
    """Of a plan with runs whose drafts are named. slots, positions, num_samples: as in SampledRows.
    behind: int64 (num samples,), which of the plan's tokens each is drawn behind. inputs: int64 of
    as many, these tokens. starts: int64 (num sampling rows,), the first sample of each."""

    plan: StepPlan
    slots: IntArray
    positions: IntArray
    num_samples: IntArray
    behind: npt.NDArray[np.int64]
    inputs: torch.Tensor
    starts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, plan: StepPlan, failed_rows: tuple[int, ...] = ()) -> Self:
        """failed_rows: as in StepResult, where it is there."""
        sampling = plan.samples > 0
        num_samples = plan.samples.copy()
        # Of a row that there was no memory for one token is told, which means nothing.
        failed = np.array(failed_rows, dtype=np.int64)
        num_samples[failed] = np.minimum(num_samples[failed], 1)
        num_samples = num_samples[sampling]
        firsts = (np.cumsum(plan.num_new_tokens) - plan.samples)[sampling]
        behind = ranges(firsts, num_samples)
        offsets = (plan.prefix_lens + plan.num_new_tokens - plan.samples)[sampling] + 1
        return cls(
            plan,
            np.repeat(plan.slots[sampling], num_samples),
            ranges(offsets, num_samples).astype(np.int32),
            num_samples,
            behind,
            torch.from_numpy(plan.input_ids[behind].astype(np.int64)),
            np.cumsum(num_samples) - num_samples,
        )


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The samples of a step, and how many of each sampling row hold.

    slots, positions: int32 (num samples,), of each sample; token_ids: int64 of as many. run_lens,
    next_ids: int64 (num sampling rows,), how many hold and the last that does. num_samples: int32
    of as many rows. order: int64 (num samples,), which sample of the result stands where; None
    where each is in its place.
    """

    slots: IntArray
    positions: IntArray
    token_ids: torch.Tensor
    run_lens: torch.Tensor
    next_ids: torch.Tensor
    num_samples: IntArray
    order: torch.Tensor | None = None

    @classmethod
    def of_one_each(cls, plan: StepPlan, result: StepResult) -> Self:
        """Of a plan without runs."""
        sampling = plan.samples > 0
        token_ids = torch.from_numpy(result.token_ids.astype(np.int64))
        return cls(
            plan.slots[sampling],
            (plan.prefix_lens + plan.num_new_tokens)[sampling],
            token_ids,
            torch.from_numpy(np.ones(len(token_ids), dtype=np.int64)),
            token_ids,
            plan.samples[sampling],
        )

    @classmethod
    def of_asked(
        cls,
        asked: AskedSamples,
        result: StepResult,
        verifier: Verifier,
        tree_verifier: TreeVerifier,
    ) -> Self:
        """Raises ValueError where the result has another number of samples than the plan."""
        plan = asked.plan
        if result.failed_rows:
            asked = AskedSamples.of(plan, result.failed_rows)
        if len(result.token_ids) != len(asked.behind):
            raise ValueError(
                f"step {plan.step_id} samples {len(asked.behind)} tokens, its result has "
                f"{len(result.token_ids)}"
            )
        token_ids = torch.from_numpy(result.token_ids.astype(np.int64))
        inputs, num_samples = asked.inputs, asked.num_samples
        order = None
        if plan.has_trees:
            trees = PlanTrees.of_samples(plan.parents[asked.behind], num_samples)
            run_lens, order = tree_verifier.accept(token_ids, inputs, num_samples, trees)
            token_ids = token_ids[order]
        else:
            run_lens = verifier.accept(token_ids, inputs, num_samples)
        last = asked.starts + run_lens.numpy() - 1
        next_ids = torch.from_numpy(token_ids.numpy()[last])
        return cls(asked.slots, asked.positions, token_ids, run_lens, next_ids, num_samples, order)

    def without(self, slots: set[int]) -> tuple[IntArray, IntArray, torch.Tensor]:
        """Slots, positions and token ids of the other slots' samples."""
        if not slots:
            return self.slots, self.positions, self.token_ids
        kept = np.isin(self.slots, list(slots), invert=True)
        return self.slots[kept], self.positions[kept], self.token_ids[torch.from_numpy(kept)]
