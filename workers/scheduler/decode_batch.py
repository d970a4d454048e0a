"""One token for every running request that is past its prefill. No Python work per row."""

import numpy as np

from workers.kv_cache.page_pool import PagePool
from workers.scheduler.plan_draft import DecodeDraft, PlanDraft
from workers.scheduler.retraction import Retractor
from workers.scheduler.running_table import RunningTable, SlotArray


class DecodeBatcher:
    """Adds decode rows to a draft and takes the pages that they need."""

    def __init__(self, table: RunningTable, pool: PagePool, retractor: Retractor) -> None:
        self._table = table
        self._pool = pool
        self._retractor = retractor
        self._page_size = np.int32(table.page_size)

    def num_rows_and_keys(self) -> tuple[int, int]:
        """How many rows would be added now, and the keys that they would read together."""
        slots = self._table.decode_slots()
        return len(slots), int(self._table.seq_lens[slots].sum(dtype=np.int64)) + len(slots)

    def add_rows(self, draft: PlanDraft, can_retract: bool) -> bool:
        """False, and nothing is added, when pages are short and nothing may be retracted now."""
        while True:
            slots = self._table.decode_slots()
            if self._take_pages(slots):
                break
            if not can_retract:
                return False
            self._retractor.retract_one()
        if len(slots):
            draft.set_decode_rows(self._advance(slots))
        return True

    def _take_pages(self, slots: SlotArray) -> bool:
        """A page for every slot whose last one is full; for all of them or for none."""
        table = self._table
        at_page_start = slots[table.seq_lens[slots] % self._page_size == 0]
        if not len(at_page_start):
            return True
        pages = self._pool.allocate(len(at_page_start))
        if pages is None:
            return False
        table.append_page_each(at_page_start, pages)
        return True

    def _advance(self, slots: SlotArray) -> DecodeDraft:
        table, page_size = self._table, self._page_size
        prefix_lens = table.seq_lens[slots]
        last_pages = table.page_table[slots, table.num_pages[slots] - 1]
        table.seq_lens[slots] += 1
        return DecodeDraft(
            slots=slots.astype(np.int32),
            prefix_lens=prefix_lens,
            out_cache_loc=last_pages * page_size + prefix_lens % page_size,
            requests=table.requests_at(slots),
        )
