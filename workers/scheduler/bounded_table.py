"""What the running requests hold of one account whose tokens are visible for a while only."""

import numpy as np
import numpy.typing as npt

from workers.kv_cache.radix_node import IntArray


class BoundedTable:
    """Transitions of SlotPages in an account beside the one that keeps every token.

    page_table[slot, i]: the account's page of the slot's i-th page of tokens, 0 where it has been
    given back or never was there. Of the pages from SlotPages.num_shared on, those from first_pages
    on are the slot's own. holds: whether the request may still see tokens of cached pages, which it
    then keeps from eviction. All zeros in a free slot.
    """

    def __init__(self, max_slots: int, num_columns: int) -> None:
        self.page_table: IntArray = np.zeros((max_slots, num_columns), dtype=np.int32)
        self.first_pages: IntArray = np.zeros(max_slots, dtype=np.int32)
        self.holds: npt.NDArray[np.bool_] = np.zeros(max_slots, dtype=np.bool_)

    def begin_with_prefix(self, slot: int, pages: IntArray) -> None:
        """pages: of the match, int32 (n,), which is held."""
        self.page_table[slot, : len(pages)] = pages
        self.holds[slot] = True

    def trim(self, slot: int, start: int, stop: int) -> IntArray:
        """Pages start .. stop - 1 are the slot's own no more, int32 (stop - start,)."""
        pages = self.page_table[slot, start:stop].copy()
        self.page_table[slot, start:stop] = 0
        self.first_pages[slot] = stop
        return pages

    def widen(self, num_columns: int) -> None:
        old = self.page_table
        self.page_table = np.zeros((old.shape[0], num_columns), dtype=np.int32)
        self.page_table[:, : old.shape[1]] = old

    def clear(self, slot: int) -> None:
        self.page_table[slot] = 0
        self.first_pages[slot] = 0
        self.holds[slot] = False

    def is_clear(self, slot: int) -> bool:
        return not (self.page_table[slot].any() or self.first_pages[slot] or self.holds[slot])
