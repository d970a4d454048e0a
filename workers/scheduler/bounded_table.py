"""What the running requests hold of one account whose tokens are visible for a while only."""

import numpy as np
import numpy.typing as npt

from workers.kv_cache.radix_node import IntArray


class BoundedTable:
    """Per-slot state beside RunningTable's; all zeros in a free slot.

    page_table[slot, i]: the account's page of the slot's i-th page of tokens, 0 where it has been
    given back or never was there. Of the pages from RunningTable.num_shared_pages on, those from
    first_pages on are the request's own. holds: whether the request may still see tokens of cached
    pages, which it then keeps from eviction.
    """

    def __init__(self, max_slots: int) -> None:
        self.page_table: IntArray = np.zeros((max_slots, 0), dtype=np.int32)
        self.first_pages: IntArray = np.zeros(max_slots, dtype=np.int32)
        self.holds: npt.NDArray[np.bool_] = np.zeros(max_slots, dtype=np.bool_)

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
