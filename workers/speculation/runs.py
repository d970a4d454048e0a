"""Runs on a rank: which positions they have, what they verify, and how much of them was right.

Noise is a function of (seed, position, token), so a draft is right exactly if it is what would have
been sampled at its position: no draft changes what a request gets. Tokens behind the first wrong
draft are dropped; their keys and values are overwritten by the next run or never read.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from workers.kv_cache.radix_node import EMPTY
from workers.sampling.state import SampledTokens
from workers.sampling.transfer import start_download
from workers.scheduler.plan import LAST_SAMPLED_TOKEN, IntArray, StepPlan, StepResult
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import DraftRows, Moved, ObservedStep, Proposer

AnyInt = np.integer[Any]


@dataclass(frozen=True, slots=True)
class SampledRuns(SampledTokens):
    """Samples of runs, wrong ones included. run_lens: int64 (num sampling rows,), how many of each
    row's samples hold. num_samples: host int32 (num sampling rows,), how many it has."""

    run_lens: torch.Tensor
    num_samples: IntArray

    def start_download(self) -> "SampledRuns":
        own = SampledTokens(self.token_ids, self.has_nan, self.logprobs).start_download()
        return SampledRuns(
            own.token_ids,
            own.has_nan,
            own.logprobs,
            start_download(self.run_lens),
            self.num_samples,
        )

    def read(self) -> StepResult:
        every = SampledTokens(self.token_ids, self.has_nan, self.logprobs).read()
        return result_of_runs(every, self.run_lens.numpy().astype(np.int32), self.num_samples)


def result_of_runs(every: StepResult, run_lens: IntArray, num_samples: IntArray) -> StepResult:
    """every, which has all samples, with those that hold. run_lens, num_samples: int32 (num
    sampling rows,)."""
    starts = np.cumsum(num_samples) - num_samples
    places = np.arange(len(every.token_ids)) - np.repeat(starts, num_samples)
    holds = np.flatnonzero(places < np.repeat(run_lens, num_samples))
    return msgspec.structs.replace(
        every,
        token_ids=every.token_ids[holds],
        logprobs=tuple([every.logprobs[index] for index in holds] if every.logprobs else ()),
        run_lens=run_lens,
        num_drafts=num_samples - np.int32(1),
    )


def observed_step(
    plan: StepPlan,
    run_lens: torch.Tensor,
    next_ids: torch.Tensor,
    moved: Moved | None = None,
) -> ObservedStep:
    """A plan that ran, with how many samples of each sampling row hold and what the last of them
    is, int64 (num sampling rows,) both, on the CPU. moved: as in ObservedStep."""
    sampling = plan.samples > 0
    num_held = (plan.num_new_tokens - plan.samples).astype(np.int64)
    num_held[sampling] += run_lens.numpy()
    all_next_ids = np.full_like(num_held, -1)
    all_next_ids[sampling] = next_ids.numpy()
    held, following = map(torch.from_numpy, (num_held, all_next_ids))
    return ObservedStep(plan.slots, plan.prefix_lens, held, following, moved)


class PlannedRows(NamedTuple):
    """Of a plan. named: int64 (n,), rows whose length the host knows, computed: int32 (n,), how
    long they are. rows: int64 (m,), those whose length depends on what is sampled, runs: those of
    them that want drafts. slots, bounds: int32 (m,), of rows, their prefixes' bounds. open_tokens:
    int64 (k,), LAST_SAMPLED_TOKEN among the plan's, open_slots: int32 (k,), whose. tokens,
    token_slots, in_row: int (their tokens,), which of the plan's they are, their slots, and where
    in their row each stands."""

    plan: StepPlan
    named: npt.NDArray[np.int64]
    computed: IntArray
    rows: npt.NDArray[np.int64]
    runs: npt.NDArray[np.int64]
    slots: IntArray
    bounds: IntArray
    open_tokens: npt.NDArray[np.int64]
    open_slots: IntArray
    tokens: npt.NDArray[np.int64]
    token_slots: npt.NDArray[np.integer]
    in_row: npt.NDArray[np.int64]


class HostRuns:
    """Runs where the host's memory is the device's: plans become exact before they are launched.

    A plan's lengths are upper bounds; here stands how many tokens every slot has in the pool.
    """

    def __init__(self, table: torch.Tensor, history: TokenHistory, proposer: Proposer) -> None:
        """table: int32 (num_slots, max_context_len) on the CPU, req_to_token."""
        self._lens: IntArray = np.zeros(len(table), dtype=np.int32)
        self._table: IntArray = table.numpy()
        self._history = history
        self._known: IntArray = history.token_ids.numpy()
        self._proposer = proposer

    def exact(self, plan: StepPlan) -> StepPlan:
        """The plan with true lengths and places, and with the drafts, of which a row may have fewer
        than planned. May be called again until the plan's samples are taken in."""
        return self.made_exact(self.planned(plan))

    def planned(self, plan: StepPlan) -> PlannedRows:
        """All of exact that does not depend on what is taken in meanwhile."""
        starts = first_tokens(plan)
        is_open = plan.input_ids[starts] == LAST_SAMPLED_TOKEN
        goes_on = is_open | (plan.samples > 1)
        # Of prompts, and of rows whose last token is named, the host knows the length, whatever
        # becomes of their rows.
        computed = plan.prefix_lens + np.where(goes_on, 0, plan.num_new_tokens).astype(np.int32)
        named = np.flatnonzero(~is_open)
        rows = np.flatnonzero(goes_on)
        slots, bounds = plan.slots[rows], plan.prefix_lens[rows]
        runs, tokens, token_slots, in_row = rows[:0], rows, slots, np.zeros_like(rows)
        places = bounds
        if not plan.is_decode and len(rows):
            num_new = plan.num_new_tokens[rows]
            runs, tokens = rows[num_new > 1], ranges(starts[rows], num_new)
            token_slots = np.repeat(slots, num_new)
            in_row = ranges(np.zeros_like(num_new), num_new)
            places = np.repeat(bounds, num_new) + in_row
        # The table has a place for every position below a slot's upper bound.
        self._table[token_slots, places] = plan.out_cache_loc[tokens]
        opens = starts[is_open], plan.slots[is_open]
        going_on = rows, runs, slots, bounds, *opens, tokens, token_slots, in_row
        return PlannedRows(plan, named, computed[named], *going_on)

    def made_exact(self, planned: PlannedRows, unheard: IntArray | None = None) -> StepPlan:
        """See exact. unheard: int32 (n,), slots of which the last samples have not been heard of:
        of all others the plan has tokens in place of LAST_SAMPLED_TOKEN. None: of no slot."""
        plan, runs = planned.plan, planned.runs
        if plan.admitted:
            self._proposer.admit(plan.admitted)
            self._history.admit(plan.admitted)
        if len(planned.named):
            self._lens[plan.slots[planned.named]] = planned.computed
        lens = self._lens[planned.slots]
        # Of bounds that are true, as those behind plain steps are, places are, too.
        if (lens != planned.bounds).any():
            prefix_lens, places = plan.prefix_lens.copy(), plan.out_cache_loc.copy()
            prefix_lens[planned.rows] = lens
            slots = planned.token_slots
            places[planned.tokens] = self._table[slots, self._lens[slots] + planned.in_row]
            plan = msgspec.structs.replace(plan, prefix_lens=prefix_lens, out_cache_loc=places)
        if unheard is not None:
            plan = self._with_last_tokens(plan, planned, unheard)
        return self._with_drafts(plan, runs) if len(runs) else plan

    def expect(self, plan: StepPlan) -> None:
        """A plan as exact gave it was launched, its samples are taken in later: until then all of
        its tokens count."""
        self._lens[plan.slots] = plan.prefix_lens + plan.num_new_tokens

    def hear(self, slots: IntArray, positions: IntArray, token_ids: npt.NDArray[AnyInt]) -> None:
        """Of samples whose rows had no drafts, so that lengths are right: int (n,) each."""
        self._known[slots, positions] = token_ids

    def take_in(
        self,
        slots: IntArray,
        positions: IntArray,
        token_ids: npt.NDArray[AnyInt],
        run_lens: npt.NDArray[np.int64],
        starts: npt.NDArray[np.int64],
    ) -> None:
        """What was sampled, at which positions of which slots: int (num samples,) each. run_lens,
        starts: int64 (num sampling rows,), how many of each row's samples hold, and its first."""
        self.hear(slots, positions, token_ids)
        self._lens[slots[starts]] = positions[starts] + run_lens - 1

    def _with_last_tokens(
        self, plan: StepPlan, planned: PlannedRows, unheard: IntArray
    ) -> StepPlan:
        """See made_exact. plan: planned, with true lengths."""
        tokens, slots = planned.open_tokens, planned.open_slots
        if len(unheard):
            is_heard = np.ones(len(self._lens), dtype=np.bool_)
            is_heard[unheard] = False
            kept = is_heard[slots]
            tokens, slots = tokens[kept], slots[kept]
        if not len(tokens):
            return plan
        input_ids = plan.input_ids.copy()
        input_ids[tokens] = self._known[slots, self._lens[slots]]
        return msgspec.structs.replace(plan, input_ids=input_ids)

    def _with_drafts(self, plan: StepPlan, runs: npt.NDArray[np.int64]) -> StepPlan:
        """runs: the rows that want drafts."""
        slots = plan.slots[runs]
        most = plan.num_new_tokens[runs] - np.int32(1)
        wanted = DraftRows(slots, self._lens[slots] + 1, most, may_branch(plan, slots))
        drafts = self._proposer.propose(wanted)
        starts = np.cumsum(plan.num_new_tokens)[runs] - plan.num_new_tokens[runs]
        columns = np.arange(most.max(initial=0))
        places = starts[:, None] + 1 + columns
        input_ids = plan.input_ids.copy()
        filled = columns < drafts.num_drafts[:, None]
        input_ids[places[filled]] = drafts.token_ids.numpy()[filled]
        filled_plan = msgspec.structs.replace(plan, input_ids=input_ids)
        if drafts.parents is not None:
            parents = ranges(np.full_like(plan.num_new_tokens, -1), plan.num_new_tokens)
            parents = parents.astype(np.int32)
            parents[places[filled]] = drafts.parents[filled]
            filled_plan = msgspec.structs.replace(filled_plan, parents=parents)
        if (drafts.num_drafts == most).all():
            return filled_plan
        unfilled = places[(columns < most[:, None]) & ~filled]
        return _without_tokens(filled_plan, unfilled, runs, 1 + drafts.num_drafts)


class RankRuns(HostRuns):
    """As HostRuns, of chains that ranks make: plans leave their drafts open as it is."""

    def _with_drafts(self, plan: StepPlan, runs: npt.NDArray[np.int64]) -> StepPlan:
        """All that are planned."""
        return plan


class RankTreeRuns(HostRuns):
    """As HostRuns, of trees that ranks make: who proposes says their shapes alone, by what a plan
    says of its rows, whatever holds before."""

    def planned(self, plan: StepPlan) -> PlannedRows:
        planned = super().planned(plan)
        if not len(planned.runs):
            return planned
        filled = super()._with_drafts(plan, planned.runs)
        if filled.num_tokens == plan.num_tokens:
            return planned._replace(plan=filled)
        return super().planned(filled)

    def _with_drafts(self, plan: StepPlan, runs: npt.NDArray[np.int64]) -> StepPlan:
        """They have been filled in."""
        return plan


def first_tokens(plan: StepPlan) -> npt.NDArray[np.int64]:
    """Where among the step's tokens each row begins, int64 (bs,)."""
    if plan.is_decode:
        return np.arange(plan.batch_size)
    starts: npt.NDArray[np.int64] = plan.num_new_tokens.cumsum(dtype=np.int64)
    starts -= plan.num_new_tokens
    return starts


def may_branch(plan: StepPlan, slots: IntArray) -> npt.NDArray[np.bool_]:
    """Which of a plan's slots with runs may have trees: not those of which a grammar makes masks,
    draft by draft, and none beside prompts, of which a tree's mask would be large."""
    has_prompts = bool((plan.samples != plan.num_new_tokens).any())
    return np.zeros(len(slots), np.bool_) if has_prompts else ~np.isin(slots, plan.masked_slots)


def _without_tokens(
    plan: StepPlan,
    tokens: npt.NDArray[np.int64],
    rows: npt.NDArray[np.int64],
    num_new: IntArray,
) -> StepPlan:
    """The plan without these of its tokens, so that rows keep num_new, int32 (len(rows),), each."""
    kept = np.ones(plan.num_tokens, dtype=np.bool_)
    kept[tokens] = False
    num_new_tokens, samples = plan.num_new_tokens.copy(), plan.samples.copy()
    num_new_tokens[rows] = samples[rows] = num_new
    is_decode = bool((num_new_tokens == 1).all())
    return msgspec.structs.replace(
        plan,
        is_decode=is_decode,
        num_new_tokens=num_new_tokens,
        samples=samples,
        input_ids=plan.input_ids[kept],
        out_cache_loc=plan.out_cache_loc[kept],
        parents=plan.parents[kept] if plan.has_trees and not is_decode else EMPTY,
    )


def ranges(starts: npt.NDArray[np.integer], lens: IntArray) -> npt.NDArray[np.int64]:
    """start, start + 1, ... of every range, one after the other, int64 (sum of lens,)."""
    stops = np.cumsum(lens)
    return np.repeat(starts - (stops - lens), lens) + np.arange(int(stops[-1]))
