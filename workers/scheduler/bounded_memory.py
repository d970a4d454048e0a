"""Pages of running requests in accounts whose tokens are visible for a while only: windows, chunks.

A request takes a page of each account for every page of tokens. As it goes on, pages that none of
its later tokens can see go back: its own to the stock, cached ones by letting go of them, so that
they may be evicted. What is not known to be numbers is cleared, see request_memory.py. A step under
way may still read them: whoever gets them writes in a later step.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from workers.kv_cache.bounded_pages import Retention, span_pages
from workers.kv_cache.page_pool import PagePool
from workers.kv_cache.prefix_cache import InsertResult, PrefixCache, PrefixMatch
from workers.kv_cache.radix_node import EMPTY, IntArray, RadixNode
from workers.scheduler.bounded_table import BoundedTable
from workers.scheduler.plan import TableWrite
from workers.scheduler.request import Request
from workers.scheduler.running_table import RunningTable


class BoundedMemory:
    """retentions: of the bounded accounts, in their order. Does nothing where there are none."""

    def __init__(
        self,
        table: RunningTable,
        pool: PagePool,
        cache: PrefixCache,
        retentions: Sequence[Retention],
    ) -> None:
        self._table = table
        self._pool = pool
        self._cache = cache
        self._retentions = tuple(retentions)
        self._page_size = table.page_size

    @property
    def num_accounts(self) -> int:
        return len(self._retentions)

    def first_page_seen(self, account: int, position: int) -> int:
        """The first page that a token at position, or any later one, may see."""
        return self._retentions[account].first_visible(position) // self._page_size

    def hold(self, node: RadixNode) -> None:
        """Keep what a request that goes on behind a locked node can see."""
        for account in range(self.num_accounts):
            self._cache.hold(node, account)

    def unhold(self, node: RadixNode) -> None:
        for account in range(self.num_accounts):
            self._cache.unhold(node, account)

    def open(self, slot: int, match: PrefixMatch) -> Iterator[TableWrite]:
        """The slot begins with a match that is held; yields what the next plan must write."""
        num_pages = len(match.pages)
        for account, bounded in enumerate(self._table.bounded):
            bounded.holds[slot] = True
            first = self.first_page_seen(account, num_pages * self._page_size)
            if first < num_pages:
                yield _write(slot, account, first, match.bounded_pages[account][first:])

    def fits(self, request: Request, match: PrefixMatch) -> bool:
        """Whether what running requests and this one can hold at once is available."""
        table, page_size = self._table, self._page_size
        if table.num_running == 0:
            return True
        growth = -(-table.max_total_lens // page_size) - table.num_shared_pages
        own_growth = -(-request.max_total_len // page_size) - len(match.pages)
        for account, (bounded, retention) in enumerate(
            zip(table.bounded, self._retentions, strict=True)
        ):
            most = span_pages(retention, page_size) + 1
            starts = np.maximum(table.num_shared_pages, bounded.first_pages)
            missing = np.minimum(growth, most) - (table.num_pages - starts)
            num_wanted = int(np.maximum(missing, 0).sum()) + min(own_growth, most)
            if num_wanted > self._pool.num_available_bounded(account):
                return False
        return True

    def drop_unseen(self, request: Request, num_computed: int) -> Iterator[tuple[int, IntArray]]:
        """Give back what no token that is still to come can see, of the first num_computed tokens.

        Yields, for an account, where those stand that nobody vouches for: the next plan must clear
        them, int32 (n,). A prompt whose states are no numbers is computed to its end all the same,
        and must not keep more than one whose are.
        """
        table, slot = self._table, request.slot
        seq_len, num_shared = int(table.seq_lens[slot]), int(table.num_shared_pages[slot])
        for account, bounded in enumerate(table.bounded):
            seen = self.first_page_seen(account, seq_len)
            if bounded.holds[slot] and seen >= num_shared:
                self._let_go(request, account)
            start = self._own_start(bounded, slot)
            stop = min(seen, num_computed // self._page_size)
            if stop > start:
                first_in_doubt = max(request.num_vouched_tokens, start * self._page_size)
                if first_in_doubt < stop * self._page_size:
                    end = stop * self._page_size
                    yield account, self._indices(bounded, slot, first_in_doubt, end)
                pages = bounded.page_table[slot, start:stop]
                self._pool.free_bounded(pages.copy(), account)
                pages[:] = 0
                bounded.first_pages[slot] = stop

    def offered(self, slot: int, num_pages: int) -> tuple[IntArray, ...]:
        """What the slot can offer the cache of its first num_pages pages of tokens, int32
        (num_pages,) by account: its own pages, 0 elsewhere."""
        offers = []
        for bounded in self._table.bounded:
            pages = bounded.page_table[slot, :num_pages].copy()
            pages[: self._own_start(bounded, slot)] = 0
            offers.append(pages)
        return tuple(offers)

    def share(
        self, request: Request, result: InsertResult, offers: tuple[IntArray, ...]
    ) -> Iterator[TableWrite]:
        """The request's first pages are the cache's from here on, result's; yields what the next
        plan must write where these are not the request's own. Before num_shared_pages grows."""
        table, slot = self._table, request.slot
        num_cached, seq_len = len(result.pages), int(table.seq_lens[slot])
        for account, bounded in enumerate(table.bounded):
            own, kept = offers[account][:num_cached], result.bounded_pages[account]
            duplicates = np.flatnonzero((own != 0) & (own != kept))
            self._pool.free_bounded(own[duplicates], account)
            bounded.page_table[slot, :num_cached] = kept
            if len(duplicates):
                first, last = int(duplicates[0]), int(duplicates[-1])
                yield _write(slot, account, first, kept[first : last + 1])
            is_seen = self.first_page_seen(account, seq_len) < num_cached
            if is_seen:
                self._cache.hold(result.node, account)
            if bounded.holds[slot]:
                self._let_go(request, account)
            bounded.holds[slot] = is_seen

    def close(self, request: Request, result: InsertResult | None) -> None:
        """Give all of the slot's own pages back but those that the cache took, as result says."""
        table, slot = self._table, request.slot
        num_pages = int(table.num_pages[slot])
        for account, (bounded, own) in enumerate(
            zip(table.bounded, self.offered(slot, num_pages), strict=True)
        ):
            kept = EMPTY if result is None else result.bounded_pages[account]
            own[: len(kept)][own[: len(kept)] == kept] = 0
            self._pool.free_bounded(own[own != 0], account)
            if bounded.holds[slot]:
                self._let_go(request, account)

    def indices_from(self, slot: int, first_token: int, stop: int) -> tuple[IntArray, ...]:
        """Where the slot's own pages keep tokens first_token .. stop - 1, by account."""
        parts = []
        for bounded in self._table.bounded:
            start = max(first_token, self._own_start(bounded, slot) * self._page_size)
            parts.append(self._indices(bounded, slot, start, stop))
        return tuple(parts)

    def _indices(self, bounded: BoundedTable, slot: int, start: int, stop: int) -> IntArray:
        positions = np.arange(start, stop, dtype=np.int32)
        pages = bounded.page_table[slot, positions // self._page_size]
        indices: IntArray = pages * np.int32(self._page_size) + positions % np.int32(
            self._page_size
        )
        return indices

    def _own_start(self, bounded: BoundedTable, slot: int) -> int:
        return max(int(self._table.num_shared_pages[slot]), int(bounded.first_pages[slot]))

    def _let_go(self, request: Request, account: int) -> None:
        if request.node is not None:
            self._cache.unhold(request.node, account)
        self._table.bounded[account].holds[request.slot] = False


def _write(slot: int, account: int, first_page: int, pages: IntArray) -> TableWrite:
    return TableWrite(np.array([slot], dtype=np.int32), first_page, pages, account + 1)
