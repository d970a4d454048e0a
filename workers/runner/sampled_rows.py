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
from workers.speculation.verifier import NO_SAMPLE, HostVerifier


@dataclass(frozen=True, slots=True)
class AskedSamples:
    """Of a plan with runs whose drafts are named. slots, positions, num_samples, starts: as in
    SampledRows. behind: int64 (num samples,), which of the plan's tokens each is drawn behind.
    expected: int32 of as many, as in HostVerifier, of rows whose drafts are chains. trees: of the
    samples; None where these are chains."""

    plan: StepPlan
    slots: IntArray
    positions: IntArray
    num_samples: IntArray
    behind: npt.NDArray[np.int64]
    expected: IntArray
    starts: npt.NDArray[np.int64]
    trees: PlanTrees | None

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
        stops = np.cumsum(num_samples)
        # A sample is to be what the next one of its row is drawn behind.
        expected = np.append(plan.input_ids[behind[1:]], np.int32(NO_SAMPLE))
        expected[stops - 1] = NO_SAMPLE
        trees = None
        if plan.has_trees:
            trees = PlanTrees.of_samples(plan.parents[behind], num_samples)
        return cls(
            plan,
            np.repeat(plan.slots[sampling], num_samples),
            ranges(offsets, num_samples).astype(np.int32),
            num_samples,
            behind,
            expected,
            stops - num_samples,
            trees,
        )


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The samples of a step, and how many of each sampling row hold.

    slots, positions, token_ids: int32 (num samples,), of each sample. run_lens: int64 (num sampling
    rows,), how many hold. num_samples: int32, starts: int64 of as many rows, the first sample of
    each. order: int64 (num samples,), which sample of the result stands where; None where each is
    in its place.
    """

    slots: IntArray
    positions: IntArray
    token_ids: IntArray
    run_lens: npt.NDArray[np.int64]
    num_samples: IntArray
    starts: npt.NDArray[np.int64]
    order: torch.Tensor | None = None

    @classmethod
    def of_one_each(cls, plan: StepPlan, result: StepResult) -> Self:
        """Of a plan without runs."""
        sampling = plan.samples > 0
        slots = plan.slots[sampling]
        return cls(
            slots,
            (plan.prefix_lens + plan.num_new_tokens)[sampling],
            result.token_ids,
            np.ones(len(slots), dtype=np.int64),
            plan.samples[sampling],
            np.arange(len(slots)),
        )

    @classmethod
    def of_asked(
        cls,
        asked: AskedSamples,
        result: StepResult,
        verifier: HostVerifier,
        tree_verifier: TreeVerifier,
    ) -> Self:
        """Raises ValueError where the result has another number of samples than the plan."""
        plan, token_ids = asked.plan, result.token_ids
        if result.failed_rows:
            asked = AskedSamples.of(plan, result.failed_rows)
        if len(token_ids) != len(asked.behind):
            raise ValueError(
                f"step {plan.step_id} samples {len(asked.behind)} tokens, its result has "
                f"{len(token_ids)}"
            )
        order = None
        if asked.trees is not None:
            run_lens, order = _held_paths(asked, asked.trees, token_ids, tree_verifier)
            token_ids = token_ids[order.numpy()]
        else:
            run_lens = verifier.accept(token_ids, asked.expected, asked.starts)
        own = asked.slots, asked.positions, token_ids, run_lens
        return cls(*own, asked.num_samples, asked.starts, order)

    @property
    def next_ids(self) -> IntArray:
        """The last sample of each row that holds, int32 (num sampling rows,)."""
        next_ids: IntArray = self.token_ids[self.starts + self.run_lens - 1]
        return next_ids

    def without(self, slots: set[int]) -> tuple[IntArray, IntArray, IntArray]:
        """Slots, positions and token ids of the other slots' samples."""
        if not slots:
            return self.slots, self.positions, self.token_ids
        kept = np.isin(self.slots, list(slots), invert=True)
        return self.slots[kept], self.positions[kept], self.token_ids[kept]


def _held_paths(
    asked: AskedSamples, trees: PlanTrees, token_ids: IntArray, verifier: TreeVerifier
) -> tuple[npt.NDArray[np.int64], torch.Tensor]:
    """Of trees: how many samples of each row hold, and their order, as in SampledRows."""
    plan, behind = asked.plan, asked.behind
    sampled, inputs = (
        torch.from_numpy(ids.astype(np.int64)) for ids in (token_ids, plan.input_ids[behind])
    )
    run_lens, order = verifier.accept(sampled, inputs, asked.num_samples, trees)
    return run_lens.numpy(), order
