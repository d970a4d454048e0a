"""Runs on a rank: which positions they have, what they verify, and how much of them was right.

Noise is a function of (seed, position, token), so a draft is right exactly if it is what would have
been sampled at its position: no draft changes what a request gets. Tokens behind the first wrong
draft are dropped; their keys and values are overwritten by the next run or never read.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from workers.sampling.state import SampledTokens
from workers.sampling.transfer import start_download
from workers.scheduler.plan import (
    LAST_SAMPLED_TOKEN,
    AdmittedRequest,
    IntArray,
    StepPlan,
    StepResult,
)


class Proposer(Protocol):
    """Drafts for the slots of one rank. Ranks of a group propose alike."""

    def admit(self, requests: Sequence[AdmittedRequest]) -> None: ...

    def extend(
        self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor
    ) -> None: ...

    def propose(self, slots: IntArray, lens: IntArray, num_drafts: int) -> torch.Tensor: ...


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
        run_lens = self.run_lens.numpy().astype(np.int32)
        starts = np.cumsum(self.num_samples) - self.num_samples
        places = np.arange(len(every.token_ids)) - np.repeat(starts, self.num_samples)
        holds = np.flatnonzero(places < np.repeat(run_lens, self.num_samples))
        return StepResult(
            every.token_ids[holds],
            tuple([every.logprobs[index] for index in holds] if every.logprobs else ()),
            run_lens=run_lens,
        )


def run_lens_of(
    token_ids: torch.Tensor, input_ids: torch.Tensor, num_samples: IntArray
) -> torch.Tensor:
    """How many samples of each row hold: those up to the first whose draft was another one.

    token_ids, input_ids: int64 (sum of num_samples,), what was sampled, and what it was sampled
    behind, row after row. num_samples: host int32 (n,). Returns int64 (n,).
    """
    width = int(num_samples.max())
    starts = np.cumsum(num_samples) - num_samples
    places = torch.from_numpy(starts[:, None] + np.arange(width)).to(token_ids.device)
    has_draft = torch.from_numpy(np.arange(1, width) < num_samples[:, None]).to(token_ids.device)
    last = len(token_ids) - 1
    drafts = input_ids[places[:, 1:].clamp(max=last)]
    is_right = (token_ids[places[:, :-1].clamp(max=last)] == drafts) & has_draft
    return 1 + is_right.long().cumprod(dim=1).sum(dim=1)


class HostRuns:
    """Runs where the host's memory is the device's: plans become exact before they are launched.

    A plan's lengths are upper bounds; here stands how many tokens every slot has in the pool.
    """

    def __init__(self, num_slots: int, table: torch.Tensor, proposer: Proposer) -> None:
        """table: int32 (num_slots, max_context_len) on the CPU, req_to_token."""
        self._lens: IntArray = np.zeros(num_slots, dtype=np.int32)
        self._table: IntArray = table.numpy()
        self._proposer = proposer

    def exact(self, plan: StepPlan) -> StepPlan:
        """The plan with true lengths and places, and with the drafts. May be called again until
        the plan's samples are taken in."""
        self._proposer.admit(plan.admitted)
        starts = np.cumsum(plan.num_new_tokens) - plan.num_new_tokens
        goes_on = plan.input_ids[starts] == LAST_SAMPLED_TOKEN
        # Of prompts the host knows the length, whatever becomes of their rows.
        computed = plan.prefix_lens + plan.num_new_tokens
        self._lens[plan.slots[~goes_on]] = computed[~goes_on]
        rows = np.flatnonzero(goes_on)
        if not len(rows):
            return plan
        prefix_lens = plan.prefix_lens.copy()
        prefix_lens[rows] = self._lens[plan.slots[rows]]
        num_new = plan.num_new_tokens[rows]
        tokens = _ranges(starts[rows], num_new)
        return msgspec.structs.replace(
            plan,
            prefix_lens=prefix_lens,
            out_cache_loc=self._places(plan, rows, tokens),
            input_ids=self._input_ids(plan, rows, tokens),
        )

    def take_in(
        self,
        slots: IntArray,
        positions: IntArray,
        token_ids: torch.Tensor,
        run_lens: torch.Tensor,
        num_samples: IntArray,
    ) -> None:
        """What was sampled, at which positions of which slots: int32 (sum of num_samples,) both."""
        rows, columns = (torch.from_numpy(own.astype(np.int64)) for own in (slots, positions))
        self._proposer.extend(rows, columns, token_ids)
        starts = np.cumsum(num_samples) - num_samples
        self._lens[slots[starts]] = positions[starts] + run_lens.numpy() - 1

    def _places(
        self, plan: StepPlan, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
    ) -> IntArray:
        """The table has a place for every position below a slot's upper bound."""
        num_new, slots = plan.num_new_tokens[rows], plan.slots[rows]
        of_tokens = np.repeat(slots, num_new)
        bounds = _ranges(plan.prefix_lens[rows], num_new)
        self._table[of_tokens, bounds] = plan.out_cache_loc[tokens]
        places = plan.out_cache_loc.copy()
        places[tokens] = self._table[of_tokens, _ranges(self._lens[slots], num_new)]
        return places

    def _input_ids(
        self, plan: StepPlan, rows: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
    ) -> IntArray:
        num_drafts = plan.num_new_tokens[rows] - 1
        most = int(num_drafts.max())
        if not most:
            return plan.input_ids
        slots = plan.slots[rows]
        drafts = self._proposer.propose(slots, self._lens[slots] + 1, most).numpy()
        last = np.full((len(rows), 1), LAST_SAMPLED_TOKEN)
        runs = np.concatenate([last, drafts], axis=1)
        input_ids = plan.input_ids.copy()
        input_ids[tokens] = runs[np.arange(1 + most) <= num_drafts[:, None]]
        return input_ids


def _ranges(starts: npt.NDArray[np.integer], lens: IntArray) -> npt.NDArray[np.int64]:
    """start, start + 1, ... of every range, one after the other, int64 (sum of lens,)."""
    stops = np.cumsum(lens)
    return np.repeat(starts - (stops - lens), lens) + np.arange(int(stops[-1]))
