"""Rows for tokens that grammars force: what must follow needs no step of its own.

The token sampled last and the forced ones behind it enter the pool in one step, each in a row of
its own, so that a step of decode rows stays one: rows of one slot stand one after the other, each
one position further. All of them sample; what the earlier ones sample is known before (decision
0088). Lengths are exact, unlike those of drafts.
"""

import numpy as np

from workers.kv_cache.page_pool import PagePool
from workers.kv_cache.radix_node import IntArray
from workers.scheduler.known_tokens import name_known
from workers.scheduler.plan import LAST_SAMPLED_TOKEN
from workers.scheduler.plan_draft import DecodeDraft, PlanDraft
from workers.scheduler.request import ConstrainedRequest, Request
from workers.scheduler.run_batch import take_run_pages
from workers.scheduler.running_table import RunningTable
from workers.scheduler.slot_pages import SlotArray

FLAT_ROWS = 64
"""Up to about so many rows a step takes as long as with one."""
MAX_SHARE = 4
"""Beyond, forced tokens add at most one row to so many, and none where a request without a grammar
would wait for the longer step (decision 0088)."""


class ForcedRows:
    """max_rows: of a step, in all; what shares of memory and graphs are made for."""

    def __init__(self, table: RunningTable, pool: PagePool, max_rows: int) -> None:
        self._table = table
        self._pool = pool
        self._max_rows = max_rows

    def add_rows(self, draft: PlanDraft) -> bool:
        """False, and nothing is added, where no token is forced or pages are short."""
        slots = self._table.decode_slots()
        requests = self._table.requests_at(slots)
        num_new = 1 + self._num_forced(slots, requests)
        if num_new.sum() == len(slots) or not take_run_pages(
            self._table, self._pool, slots, num_new
        ):
            return False
        rows = self._advance(slots, requests, num_new)
        draft.set_decode_rows(rows)
        draft.constrain(rows.requests, rows.prefix_lens + 1)
        return True

    def _num_forced(self, slots: SlotArray, requests: list[Request]) -> IntArray:
        """How many forced tokens each slot brings beside the one sampled last. A request's last
        token never enters the pool."""
        num_spare = self._num_spare(requests)
        if num_spare == 0 or not any(
            isinstance(one, ConstrainedRequest) and one.forced for one in requests
        ):
            return np.zeros(len(requests), dtype=np.int32)
        seq_lens = self._table.seq_lens[slots]
        most = self._table.max_total_lens[slots] - 2 - seq_lens
        known = np.array([_num_known(request) for request in requests], dtype=np.int32)
        wanted = np.maximum(np.minimum(known - 1 - seq_lens, most), 0)
        # First come, first served: who gets none now is nearer to the front in no time.
        granted = np.minimum(np.cumsum(wanted), num_spare)
        num_forced: IntArray = granted.astype(np.int32)
        num_forced[1:] -= num_forced[:-1].copy()
        return num_forced

    def _num_spare(self, requests: list[Request]) -> int:
        num_rows = len(requests)
        most = FLAT_ROWS - num_rows
        if all(isinstance(one, ConstrainedRequest) for one in requests):
            most = max(most, num_rows // MAX_SHARE)
        return max(min(most, self._max_rows - num_rows), 0)

    def _advance(self, slots: SlotArray, requests: list[Request], num_new: IntArray) -> DecodeDraft:
        table, page_size = self._table, np.int32(self._table.page_size)
        seq_lens = table.seq_lens[slots]
        starts = np.cumsum(num_new, dtype=np.int32) - num_new
        places = np.arange(int(num_new.sum()), dtype=np.int32) - np.repeat(starts, num_new)
        prefix_lens = np.repeat(seq_lens, num_new) + places
        input_ids = np.full(len(places), LAST_SAMPLED_TOKEN, dtype=np.int32)
        repeated = [
            one for one, num in zip(requests, num_new.tolist(), strict=True) for _ in range(num)
        ]
        name_known(input_ids, repeated, prefix_lens)
        columns, offsets = prefix_lens // page_size, prefix_lens % page_size
        rows = np.repeat(slots, num_new)
        table.seq_lens[slots] += num_new
        return DecodeDraft(
            rows.astype(np.int32),
            prefix_lens,
            np.ones(len(rows), dtype=np.int32),
            input_ids,
            tuple([pages[rows, columns] * page_size + offsets for pages in table.pages.tables]),
            repeated,
            has_repeats=True,
        )


def _num_known(request: Request) -> int:
    """Tokens of a request that the host knows: of others than those under grammars, that is
    asked of nobody."""
    if isinstance(request, ConstrainedRequest):
        return request.num_tokens + len(request.forced)
    return 0
