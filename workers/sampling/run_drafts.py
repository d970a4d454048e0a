"""Drafts that a row's samples are drawn behind, for rules that look at the tokens before.

What such a rule has counted ends with the token sampled last. Each sample of a run is drawn as if
the drafts before it had been sampled, and of the samples those are counted that hold: behind a
wrong draft none does. Knows slots' rows and token ids.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from workers.sampling.transfer import upload
from workers.scheduler.plan import IntArray, StepPlan
from workers.scheduler.plan_tree import PlanTrees


@dataclass(frozen=True, slots=True)
class RunDrafts:
    """Of all samples of a step, host int32 (n,) both. token_ids: what each is drawn behind.
    num_before: how many drafts that and the ones before it are, 0 for a row's first. paths: as in
    PlanTrees; None where a row's drafts stand one behind the other."""

    token_ids: IntArray
    num_before: IntArray
    paths: npt.NDArray[np.int64] | None = None

    @classmethod
    def of(cls, plan: StepPlan, trees: PlanTrees | None = None) -> "RunDrafts":
        """Of a plan with runs. It names their drafts. trees: where it has any."""
        if trees is not None:
            return cls(plan.input_ids, trees.depths, trees.paths)
        samples, stops = plan.samples, np.cumsum(plan.samples, dtype=np.int32)
        own = np.arange(stops[-1], dtype=np.int32)
        row_ends = np.cumsum(plan.num_new_tokens, dtype=np.int32)
        token_ids = plan.input_ids[own + np.repeat(row_ends - stops, samples)]
        return cls(token_ids, own - np.repeat(stops - samples, samples))

    def before(
        self, rows: npt.NDArray[np.int64], device: torch.device
    ) -> "tuple[DraftsBefore, ...]":
        """Of some samples, ascending, whole runs of them or their beginnings: one, or none where
        none of these has a draft before it."""
        num_before = self.num_before[rows].astype(np.int64)
        width = int(num_before.max(initial=0))
        if width == 0:
            return ()
        columns = np.arange(width)
        is_draft = columns < num_before[:, None]
        # The draft in column j is what the sample in this row was to be.
        if self.paths is None:
            places = rows[:, None] - num_before[:, None] + columns
            drafts_at = places + 1
        else:
            places, drafts_at = self.paths[rows, :width], self.paths[rows, 1 : width + 1]
        sources = np.where(is_draft, places, rows[:, None])
        drafts = self.token_ids[np.where(is_draft, drafts_at, 0)].astype(np.int64)
        drafts[~is_draft] = 0
        is_first = num_before == 0
        return (
            DraftsBefore.of(
                upload(
                    [
                        drafts,
                        is_draft.astype(np.int32),
                        num_before[:, None],
                        sources,
                        np.flatnonzero(is_first),
                        np.cumsum(is_first) - 1,
                    ],
                    device,
                )
            ),
        )


@dataclass(frozen=True, slots=True)
class DeviceRunDrafts(RunDrafts):
    """Of drafts that the host does not know, which stand one behind the other: token_ids are any
    where on_device, int64 (n,), says which."""

    on_device: Tensor = field(kw_only=True)

    @classmethod
    def with_ids(cls, drafts: RunDrafts, on_device: Tensor) -> "DeviceRunDrafts":
        return cls(drafts.token_ids, drafts.num_before, on_device=on_device)

    def before(
        self, rows: npt.NDArray[np.int64], device: torch.device
    ) -> "tuple[DraftsBefore, ...]":
        return tuple(self._named(one) for one in RunDrafts.before(self, rows, device))

    def _named(self, before: "DraftsBefore") -> "DraftsBefore":
        # A draft stands behind the sample that was to be it.
        places = (before.sources + 1).clamp(max=len(self.on_device) - 1)
        return before._replace(token_ids=self.on_device[places] * before.counts)


@dataclass(frozen=True, slots=True)
class DeviceTreeDrafts(DeviceRunDrafts):
    """Of drafts that are trees, of which the host knows the depths. parents: int64 (n,) on the
    device, which of the samples' tokens each stands behind, a root itself."""

    parents: Tensor = field(kw_only=True)

    @classmethod
    def of_trees(cls, drafts: RunDrafts, on_device: Tensor, parents: Tensor) -> "DeviceTreeDrafts":
        return cls(drafts.token_ids, drafts.num_before, on_device=on_device, parents=parents)

    def before(
        self, rows: npt.NDArray[np.int64], device: torch.device
    ) -> "tuple[DraftsBefore, ...]":
        """As if they stood one behind the other, but for the drafts and their parents."""
        found = RunDrafts.before(self, rows, device)
        return tuple(self._on_paths(one, *upload([rows], device)) for one in found)

    def _on_paths(self, before: "DraftsBefore", rows: Tensor) -> "DraftsBefore":
        width = before.counts.shape[1]
        upwards = [rows]
        for _ in range(width):
            upwards.append(self.parents[upwards[-1]])
        columns = torch.arange(width + 1, device=rows.device)
        paths = torch.stack(upwards, dim=1).gather(1, (before.num - columns).clamp(min=0))
        is_draft = before.counts > 0
        sources = torch.where(is_draft, paths[:, :width], rows.unsqueeze(1))
        token_ids = self.on_device[paths[:, 1:]] * before.counts
        return before._replace(token_ids=token_ids, sources=sources)


class DraftsBefore(NamedTuple):
    """Of m samples in k runs, on the device. All are int64 but counts.

    token_ids (m, width): the drafts before each sample, in order, then any. counts: int32, of that
    shape, 1 for each draft, 0 behind them. num (m, 1): how many there are. sources, of the same
    shape: which sample of the step would have had to be the draft. firsts (k,): which of the m
    begins each run. run_of (m,): the run of each.
    """

    token_ids: Tensor
    counts: Tensor
    num: Tensor
    sources: Tensor
    firsts: Tensor
    run_of: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "DraftsBefore":
        return cls._make(tensors)

    def held(self, sampled: Tensor) -> "HeldSamples":
        """sampled: int64 (n,), all samples of the step."""
        is_right = sampled[self.sources] == self.token_ids
        holds = (is_right | (self.counts == 0)).all(dim=1)
        places = torch.arange(len(holds), device=holds.device).where(holds, 0)
        last = self.firsts.scatter_reduce(0, self.run_of, places, "amax")
        return HeldSamples(self, holds, last)


class HeldSamples(NamedTuple):
    """Which of m samples behind drafts hold, bool (m,), and which is the last to of each run, int64
    (k,)."""

    drafts: DraftsBefore
    holds: Tensor
    last: Tensor
