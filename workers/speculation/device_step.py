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
from workers.scheduler.plan import DRAFT_TOKEN, LAST_SAMPLED_TOKEN, IntArray, StepPlan
from workers.speculation.runs import first_tokens, ranges
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
    int64 (n,), where among the step's tokens each row begins. width: drafts of the row with the
    most. is_even: whether all rows want as many."""

    rows: npt.NDArray[np.int64]
    slots: IntArray
    prefix_lens: IntArray
    num_drafts: IntArray
    firsts: npt.NDArray[np.int64]
    width: int
    is_even: bool

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        return cls.of_rows(plan, first_tokens(plan))

    @classmethod
    def of_rows(cls, plan: StepPlan, firsts: npt.NDArray[np.int64]) -> Self:
        """firsts: int64 (bs,), where among the step's tokens each of its rows begins."""
        num_drafts = np.add.reduceat(plan.input_ids == DRAFT_TOKEN, firsts, dtype=np.int32)
        rows = num_drafts.nonzero()[0]
        wanted = num_drafts[rows]
        width = int(wanted.max(initial=0))
        own = plan.slots[rows], plan.prefix_lens[rows], wanted, firsts[rows]
        return cls(rows, *own, width, bool((wanted == width).all()))

    def __len__(self) -> int:
        return len(self.rows)


class _OnDevice(NamedTuple):
    """A step's tokens, int64 (num_tokens,) each. positions: in the text, which are places but for
    trees. naming: where drafts of its runs go, int64 (num
    drafts,) each: targets among these, sources among the drafts, the first token of the row."""

    ids: torch.Tensor
    token_slots: torch.Tensor
    places: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    naming: tuple[torch.Tensor, ...]


class DrafterStep:
    """plan: as it runs; what it admits, clears and writes to tables has been done. firsts: int64
    (bs,), where among its tokens each row begins. runs: of it. has_unknown: whether it leaves it to
    the device what a slot has sampled last. trees: None where all drafts stand one behind the
    other. table: int32 (num_slots, max_context_len), where tokens of slots stand.

    Tensors are made once somebody asks for them, at once only where a slot's last token is not
    named, which changes as the step runs: graphs of drafts need none.
    """

    def __init__(self, plan: StepPlan, sampling: SamplingState, table: torch.Tensor) -> None:
        self.plan = plan
        self.firsts = first_tokens(plan)
        self.runs = RunRows.of_rows(plan, self.firsts)
        self._table = table
        self.trees: StepTrees | None = None
        if plan.has_trees:
            self.trees = StepTrees.of(plan, _places(plan).astype(np.int32), table.device)
        self._unnamed: DeviceDrafts | None = None
        self._on_device: _OnDevice | None = None
        self.has_unknown = bool((plan.input_ids == LAST_SAMPLED_TOKEN).any())
        if self.has_unknown:
            own = self._tensors()
            self._on_device = own._replace(ids=sampling.resolve(own.ids, own.token_slots))

    @property
    def ids(self) -> torch.Tensor:
        """int64 (num_tokens,). Where drafts are to stand any, until name has been called."""
        own = self._tensors()
        drafts, self._unnamed = self._unnamed, None
        if drafts is not None:
            targets, sources, _ = self._naming_of(drafts)
            token_ids = drafts.token_ids.reshape(-1).index_select(0, sources)
            own.ids.index_copy_(0, targets, token_ids)
        return own.ids

    @property
    def even_drafts(self) -> torch.Tensor | None:
        """int64 (bs, num drafts), where every row is a run of as many drafts, which are named: then
        the plan says all else of the tokens. None otherwise."""
        runs, drafts = self.runs, self._unnamed
        is_even = len(runs) == self.plan.batch_size and runs.is_even and self.trees is None
        if drafts is None or not is_even or drafts.token_ids.shape[1] != runs.width:
            return None
        return drafts.token_ids

    @property
    def token_slots(self) -> torch.Tensor:
        """int64 (num_tokens,)."""
        return self._tensors().token_slots

    @property
    def places(self) -> torch.Tensor:
        """int64 (num_tokens,), as in PlanTrees."""
        return self._tensors().places

    @property
    def positions(self) -> torch.Tensor:
        """int64 (num_tokens,), as in PlanTrees."""
        return self._tensors().positions

    @property
    def out_cache_loc(self) -> torch.Tensor:
        """int64 (num_tokens,)."""
        return self._tensors().out_cache_loc

    def place_tokens(self) -> None:
        """The table learns where the tokens go, for passes ahead of the target's, which writes it,
        too."""
        self._table[self.token_slots, self.places] = self.out_cache_loc.int()

    def name(self, drafts: DeviceDrafts) -> None:
        """Of the runs."""
        self._unnamed = drafts
        if self.trees is None or drafts.parents is None:
            return
        num_rows, runs = self.plan.batch_size, self.runs
        is_even = len(runs) == num_rows and runs.is_even
        if is_even and drafts.parents.shape[1] == runs.width:
            own = self.trees.parents.view(num_rows, 1 + runs.width)[:, 1:]
            torch.add(drafts.parents, self.trees.starts[:-1].unsqueeze(1), out=own)
        else:
            targets, sources, roots = self._naming_of(drafts)
            parents = drafts.parents.reshape(-1).index_select(0, sources)
            self.trees.parents.index_copy_(0, targets, roots + parents)

    def _tensors(self) -> _OnDevice:
        """In one copy."""
        if self._on_device is None:
            plan = self.plan
            token_slots = np.repeat(plan.slots, plan.num_new_tokens)
            own: list[npt.NDArray[np.integer]] = [plan.input_ids, token_slots]
            own += [plan.out_cache_loc, _places(plan)]
            if self.trees is not None:
                own.append(self.trees.shape.positions)
            naming = self._naming(self.runs.width)
            arrays = [one.astype(np.int64) for one in own] + naming
            tensors = upload(arrays, self._table.device)
            ids, slots, locs, places = tensors[:4]
            positions, of_naming = tensors[len(own) - 1], tuple(tensors[len(own) :])
            self._on_device = _OnDevice(ids, slots, places, positions, locs, of_naming)
        return self._on_device

    def _naming_of(self, drafts: DeviceDrafts) -> tuple[torch.Tensor, ...]:
        """See _OnDevice."""
        width = drafts.token_ids.shape[1]
        if width == self.runs.width:
            return self._tensors().naming
        return tuple(upload(self._naming(width), self._table.device))

    def _naming(self, width: int) -> list[npt.NDArray[np.int64]]:
        """See _OnDevice, of drafts (len(runs), width)."""
        runs = self.runs
        columns = np.arange(width)
        filled = columns < runs.num_drafts[:, None]
        targets = (runs.firsts[:, None] + 1 + columns)[filled]
        return [targets, np.flatnonzero(filled), np.repeat(runs.firsts, runs.num_drafts)]


def _places(plan: StepPlan) -> npt.NDArray[np.int64]:
    """Of the plan's tokens, int64 (num_tokens,), as in PlanTrees."""
    return ranges(plan.prefix_lens, plan.num_new_tokens)
