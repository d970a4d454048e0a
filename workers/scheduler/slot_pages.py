"""Which pages running requests have, by slot: the one place that says whose a page is.

    page_table[slot]:  | shared: the cache's, locked by node | the slot's own | unused |
                       0                           num_shared            num_pages

A slot begins with a prefix of the cache, grows, gives full pages to the cache and releases what is
left. In accounts whose tokens are visible for a while only, bounded_table.py, it is trimmed from
the left as well. Whoever makes a transition moves pages, locks and holds as it says; neither the
stock of pages nor requests are known here.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from workers.errors import IntegrityError
from workers.kv_cache.prefix_cache import InsertResult, PrefixMatch
from workers.kv_cache.radix_node import IntArray, RadixNode
from workers.scheduler.bounded_table import BoundedTable
from workers.scheduler.page_row import Replaced, replace_own, token_indices

SlotArray = npt.NDArray[np.int64]

_INITIAL_COLUMNS = 64


class SlotPages:
    """num_pages, num_shared int32 (max_slots,): as in the picture. num_found: how many of the
    shared pages were there before the request came. bounded: of the accounts beside account 0,
    which keeps every token. A free slot has nothing; unused entries of page_table mean nothing."""

    def __init__(
        self, max_slots: int, max_pages_per_request: int, page_size: int, num_bounded: int = 0
    ) -> None:
        self.num_pages: IntArray = np.zeros(max_slots, dtype=np.int32)
        self.num_shared: IntArray = np.zeros(max_slots, dtype=np.int32)
        self.num_found: IntArray = np.zeros(max_slots, dtype=np.int32)
        # Grows in width with the longest request: a long context costs nothing until it is used.
        num_columns = min(_INITIAL_COLUMNS, max_pages_per_request)
        self.page_table: IntArray = np.zeros((max_slots, num_columns), dtype=np.int32)
        self.bounded = tuple(BoundedTable(max_slots, num_columns) for _ in range(num_bounded))
        self._nodes: list[RadixNode | None] = [None] * max_slots
        self._max_columns = max_pages_per_request
        self._page_size = page_size

    @property
    def tables(self) -> tuple[IntArray, ...]:
        """page_table of every account, (max_slots, columns) each."""
        if not self.bounded:
            return (self.page_table,)
        return self.page_table, *(bounded.page_table for bounded in self.bounded)

    def node_of(self, slot: int) -> RadixNode:
        """What the slot's shared pages are locked by. Raises IntegrityError for a free slot."""
        node = self._nodes[slot]
        if node is None:
            raise IntegrityError(f"slot {slot} has no prefix node")
        return node

    def begin_with_prefix(self, slot: int, match: PrefixMatch) -> None:
        """A free slot begins with a match that is locked, and held in every bounded account."""
        n = len(match.pages)
        self._widen(n)
        self._nodes[slot] = match.node
        self.page_table[slot, :n] = match.pages
        self.num_pages[slot] = self.num_shared[slot] = self.num_found[slot] = n
        for bounded, pages in zip(self.bounded, match.bounded_pages, strict=True):
            bounded.begin_with_prefix(slot, pages)

    def grow(self, slot: int, pages: Sequence[IntArray]) -> None:
        """More pages of the slot's own, of every account, int32 (n,) each."""
        start = int(self.num_pages[slot])
        stop = start + len(pages[0])
        self._widen(stop)
        for table, of_account in zip(self.tables, pages, strict=True):
            table[slot, start:stop] = of_account
        self.num_pages[slot] = stop

    def grow_each(self, slots: SlotArray, pages: Sequence[IntArray]) -> None:
        """One more page of every account, int32 (n,) each, for each of the slots (n,)."""
        columns = self.num_pages[slots]
        self._widen(int(columns.max()) + 1)
        for table, of_account in zip(self.tables, pages, strict=True):
            table[slots, columns] = of_account
        self.num_pages[slots] += 1

    def offer(self, slot: int, num_pages: int) -> tuple[IntArray, ...]:
        """What the cache is offered of the slot's first num_pages pages of tokens, int32
        (num_pages,) by account: of account 0 all of them, of others its own, 0 elsewhere."""
        offers = [table[slot, :num_pages].copy() for table in self.tables]
        for account, pages in enumerate(offers[1:], 1):
            pages[: self.own_start(slot, account)] = 0
        return tuple(offers)

    def give_to_cache(self, slot: int, result: InsertResult) -> tuple[Replaced, ...]:
        """The slot shares its first pages with the cache from now on, result's, locked by its node.
        Returns by account which of its own it lost to pages that the cache had already.

        Raises IntegrityError where it had shared more than that.
        """
        num_cached, num_shared = len(result.pages), int(self.num_shared[slot])
        if not num_shared <= num_cached <= self.num_pages[slot]:
            raise IntegrityError(f"slot {slot} shared {num_shared} pages, and now {num_cached}")
        kept = result.pages, *result.bounded_pages
        replaced = tuple(
            replace_own(table[slot], of_cache, self.own_start(slot, account))
            for account, (table, of_cache) in enumerate(zip(self.tables, kept, strict=True))
        )
        self.num_shared[slot] = num_cached
        self._nodes[slot] = result.node
        return replaced

    def trim(self, slot: int, account: int, stop: int) -> IntArray:
        """The slot's own pages of a bounded account, from 1 on, that stand before page stop of its
        tokens are its no more, int32 (n,)."""
        return self.bounded[account - 1].trim(slot, self.own_start(slot, account), stop)

    def release(self, slot: int, result: InsertResult | None) -> tuple[IntArray, ...]:
        """The slot is free. Returns by account, int32 (n,) each, its own pages but for those that
        the cache has taken, as result says."""
        kept = None if result is None else (result.pages, *result.bounded_pages)
        unwanted = []
        for account in range(1 + len(self.bounded)):
            own = self.own_pages(slot, account)
            if kept is not None:
                taken = kept[account][self.own_start(slot, account) :]
                own[: len(taken)][own[: len(taken)] == taken] = 0
            unwanted.append(own[own != 0])
        for array in (self.num_pages, self.num_shared, self.num_found):
            array[slot] = 0
        for bounded in self.bounded:
            bounded.clear(slot)
        self._nodes[slot] = None
        return tuple(unwanted)

    def own_start(self, slot: int, account: int) -> int:
        """The first page of tokens whose page of the account is the slot's own."""
        start = int(self.num_shared[slot])
        return max(start, int(self.bounded[account - 1].first_pages[slot])) if account else start

    def own_pages(self, slot: int, account: int) -> IntArray:
        """A copy of the account's pages that are the slot's own, int32 (n,)."""
        start, stop = self.own_start(slot, account), int(self.num_pages[slot])
        return self.tables[account][slot, start:stop].copy()

    def cache_indices(self, slot: int, start: int, stop: int) -> tuple[IntArray, ...]:
        """Where tokens start .. stop - 1 stand in the pool of each account, which must have all of
        them, int32 (stop - start,)."""
        size = self._page_size
        return tuple(token_indices(table[slot], size, start, stop) for table in self.tables)

    def own_indices(self, slot: int, account: int, start: int, stop: int) -> IntArray:
        """As cache_indices, of those tokens in one account that stand on the slot's own pages."""
        first = max(start, self.own_start(slot, account) * self._page_size)
        return token_indices(self.tables[account][slot], self._page_size, first, stop)

    def check_integrity(self, used: Iterable[int]) -> None:
        """Raise IntegrityError unless free slots have nothing, and those used what their nodes and
        their own pages say."""
        used = set(used)
        for slot, node in enumerate(self._nodes):
            counts = [
                int(array[slot]) for array in (self.num_found, self.num_shared, self.num_pages)
            ]
            if slot not in used:
                is_clear = node is None and not any(counts)
                if not is_clear or not all(bounded.is_clear(slot) for bounded in self.bounded):
                    raise IntegrityError(f"free slot {slot} has pages left")
                continue
            if counts != sorted(counts):
                raise IntegrityError(f"slot {slot} found, shares and has {counts} pages")
            shared = self.page_table[slot, : counts[1]]
            if not np.array_equal(self.node_of(slot).path_pages(), shared):
                raise IntegrityError(f"slot {slot} shares {shared.tolist()}, not its node's path")
            for account in range(1 + len(self.bounded)):
                if not self.own_pages(slot, account).all():
                    raise IntegrityError(f"slot {slot} lacks pages of account {account}")

    def _widen(self, num_columns: int) -> None:
        old = self.page_table
        if num_columns <= old.shape[1]:
            return
        if num_columns > self._max_columns:
            raise IntegrityError(f"{num_columns} pages for one request of {self._max_columns}")
        width = min(max(num_columns, 2 * old.shape[1]), self._max_columns)
        self.page_table = np.zeros((old.shape[0], width), dtype=np.int32)
        self.page_table[:, : old.shape[1]] = old
        for bounded in self.bounded:
            bounded.widen(width)
