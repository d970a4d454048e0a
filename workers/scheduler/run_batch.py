"""Runs: decode rows that bring drafts beside the token sampled last, all verified in one step.

How many of a run's drafts are right the device knows first. Until the run is committed the table
counts them all, so that lengths are upper bounds and pages suffice; RunningTable.settle takes the
wrong ones back. Which tokens the drafts are is nothing to the scheduler. No Python work per row.
"""

from typing import Protocol

import numpy as np

from workers.kv_cache.page_pool import PagePool
from workers.kv_cache.radix_node import IntArray
from workers.scheduler.known_tokens import name_known
from workers.scheduler.plan import DRAFT_TOKEN, LAST_SAMPLED_TOKEN
from workers.scheduler.plan_draft import DecodeDraft, PlanDraft
from workers.scheduler.running_table import RunningTable
from workers.scheduler.slot_pages import SlotArray
from workers.speculation.policy import DraftPolicy


class DecodeRowAdder(Protocol):
    """Adds rows of running requests that are past their prefill."""

    def num_rows_and_keys(self) -> tuple[int, int]:
        """How many rows would be added now, and the keys that they would read together."""
        ...

    def add_rows(self, draft: PlanDraft, can_retract: bool) -> bool:
        """False, and nothing is added, when pages are short and nothing may be retracted now."""
        ...


class RunBatcher:
    """Rows with drafts where policy, budget and pages allow; others as plain adds them.

    Drafts take at most half of what a step may compute beside one token a row: prompts go on.
    """

    def __init__(
        self,
        plain: DecodeRowAdder,
        table: RunningTable,
        pool: PagePool,
        max_step_tokens: int,
        policy: DraftPolicy,
    ) -> None:
        self._plain = plain
        self._policy = policy
        self._table = table
        self._pool = pool
        self._max_step_tokens = max_step_tokens

    def num_rows_and_keys(self) -> tuple[int, int]:
        return self._plain.num_rows_and_keys()

    def add_rows(self, draft: PlanDraft, can_retract: bool) -> bool:
        slots = self._table.decode_slots()
        num_drafts = self._num_drafts(slots)
        if num_drafts.any() and take_run_pages(self._table, self._pool, slots, 1 + num_drafts):
            rows = self._advance(slots, num_drafts)
            draft.set_decode_rows(rows)
            if self._table.num_constrained:
                draft.constrain(rows.requests, rows.prefix_lens + 1)
            return True
        return self._plain.add_rows(draft, can_retract)

    def _num_drafts(self, slots: SlotArray) -> IntArray:
        """A request's last token never enters the pool, and no draft of it is of any use."""
        table = self._table
        useful = table.max_total_lens[slots] - 2 - table.seq_lens[slots]
        share = (self._max_step_tokens - len(slots)) // 2 // max(len(slots), 1)
        most: IntArray = np.minimum(table.max_drafts[slots], np.minimum(useful, share))
        np.maximum(most, 0, out=most)
        return np.minimum(most, self._policy.choose(most)) if most.any() else most

    def _advance(self, slots: SlotArray, num_drafts: IntArray) -> DecodeDraft:
        table, page_size = self._table, np.int32(self._table.page_size)
        prefix_lens, num_new = table.seq_lens[slots], 1 + num_drafts
        starts = np.cumsum(num_new, dtype=np.int32) - num_new
        num_tokens = int(num_new.sum())
        positions = np.repeat(prefix_lens - starts, num_new) + np.arange(num_tokens, dtype=np.int32)
        columns, offsets = positions // page_size, positions % page_size
        rows = np.repeat(slots, num_new)
        input_ids = np.full(num_tokens, DRAFT_TOKEN, dtype=np.int32)
        first = np.full(len(slots), LAST_SAMPLED_TOKEN, dtype=np.int32)
        requests = table.requests_at(slots)
        if table.num_constrained:
            # What the host knows by now nothing behind is in doubt of: there the length is exact.
            name_known(first, requests, prefix_lens)
        input_ids[starts] = first
        table.seq_lens[slots] += num_new
        return DecodeDraft(
            slots.astype(np.int32),
            prefix_lens,
            num_new,
            input_ids,
            tuple([pages[rows, columns] * page_size + offsets for pages in table.pages.tables]),
            requests,
            tuple(num_drafts.tolist()),
        )


def take_run_pages(
    table: RunningTable, pool: PagePool, slots: SlotArray, num_new: IntArray
) -> bool:
    """What every slot lacks for num_new more tokens; for all of them or for none."""
    num_tokens = table.seq_lens[slots] + num_new
    missing = -(-num_tokens // np.int32(table.page_size)) - table.pages.num_pages[slots]
    pages = pool.allocate(int(np.maximum(missing, 0).sum()))
    if pages is None:
        return False
    start = 0
    for turn in range(int(missing.max())):
        takers = slots[missing > turn]
        stop = start + len(takers)
        table.pages.grow_each(takers, [of_account[start:stop] for of_account in pages])
        start = stop
    return True
