"""One token for every running request that is past its prefill. No Python work per row."""

import numpy as np

from workers.kv_cache.page_pool import PagePool
from workers.kv_cache.radix_node import IntArray
from workers.scheduler.forced_rows import ForcedRows
from workers.scheduler.known_tokens import name_known
from workers.scheduler.plan_draft import DecodeDraft, PlanDraft
from workers.scheduler.request_memory import RequestMemory
from workers.scheduler.retraction import Retractor
from workers.scheduler.running_table import RunningTable
from workers.scheduler.slot_pages import SlotArray


class DecodeBatcher:
    """Adds decode rows to a draft and takes the pages that they need. forced: adds them where
    grammars force tokens; None where a slot has one row of a step at most."""

    def __init__(
        self,
        table: RunningTable,
        memory: RequestMemory,
        pool: PagePool,
        retractor: Retractor,
        forced: ForcedRows | None,
    ) -> None:
        self._table = table
        self._memory = memory
        self._pool = pool
        self._retractor = retractor
        self._forced = forced
        self._page_size = np.int32(table.page_size)

    def num_rows_and_keys(self) -> tuple[int, int]:
        """How many rows would be added now, and the keys that they would read together."""
        slots = self._table.decode_slots()
        return len(slots), int(self._table.seq_lens[slots].sum(dtype=np.int64)) + len(slots)

    def add_rows(self, draft: PlanDraft, can_retract: bool) -> bool:
        """False, and nothing is added, when pages are short and nothing may be retracted now."""
        if (
            self._forced is not None
            and self._table.num_constrained
            and self._forced.add_rows(draft)
        ):
            return True
        while True:
            slots = self._table.decode_slots()
            prefix_lens = self._table.seq_lens[slots]
            if self._take_pages(slots, prefix_lens):
                break
            if not can_retract:
                return False
            self._retractor.retract_one()
        if len(slots):
            rows = self._advance(slots, prefix_lens)
            draft.set_decode_rows(rows)
            if self._table.num_constrained:
                name_known(rows.input_ids, rows.requests, rows.prefix_lens)
                draft.constrain(rows.requests, rows.prefix_lens + 1)
        return True

    def _take_pages(self, slots: SlotArray, prefix_lens: IntArray) -> bool:
        """A page for every slot whose pages are full; for all of them or for none."""
        table = self._table
        at_page_start = slots[prefix_lens == table.pages.num_pages[slots] * self._page_size]
        if not len(at_page_start):
            return True
        if table.pages.bounded:
            self._memory.drop_unseen(table.requests_at(at_page_start))
        pages = self._pool.allocate(len(at_page_start))
        if pages is None:
            return False
        table.pages.grow_each(at_page_start, pages)
        return True

    def _advance(self, slots: SlotArray, prefix_lens: IntArray) -> DecodeDraft:
        table, page_size = self._table, self._page_size
        columns = prefix_lens // page_size
        offsets = prefix_lens - columns * page_size
        table.seq_lens[slots] = prefix_lens + np.int32(1)
        for states in self._memory.states:
            states.plan_decode(slots)
        return DecodeDraft.of_one_token_each(
            slots.astype(np.int32),
            prefix_lens,
            tuple([pages[slots, columns] * page_size + offsets for pages in table.pages.tables]),
            table.requests_at(slots),
        )
