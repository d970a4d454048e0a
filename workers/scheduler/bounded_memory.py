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
from workers.kv_cache.prefix_cache import PrefixCache, PrefixMatch
from workers.kv_cache.radix_node import IntArray, RadixNode
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
        self._pages = table.pages
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
        for account in range(self.num_accounts):
            first = self.first_page_seen(account, num_pages * self._page_size)
            if first < num_pages:
                yield _write(slot, account, first, match.bounded_pages[account][first:])

    def fits(self, request: Request, match: PrefixMatch) -> bool:
        """Whether what running requests and this one can hold at once is available."""
        table, pages, page_size = self._table, self._pages, self._page_size
        if table.num_running == 0:
            return True
        growth = -(-table.max_total_lens // page_size) - pages.num_shared
        own_growth = -(-request.max_total_len // page_size) - len(match.pages)
        for account, (bounded, retention) in enumerate(
            zip(pages.bounded, self._retentions, strict=True)
        ):
            most = span_pages(retention, page_size) + 1
            starts = np.maximum(pages.num_shared, bounded.first_pages)
            missing = np.minimum(growth, most) - (pages.num_pages - starts)
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
        pages, slot = self._pages, request.slot
        seq_len, num_shared = int(self._table.seq_lens[slot]), int(pages.num_shared[slot])
        for account, bounded in enumerate(pages.bounded):
            seen = self.first_page_seen(account, seq_len)
            if bounded.holds[slot] and seen >= num_shared:
                self._cache.unhold(pages.node_of(slot), account)
                bounded.holds[slot] = False
            start = pages.own_start(slot, account + 1)
            stop = min(seen, num_computed // self._page_size)
            if stop > start:
                first_in_doubt = max(request.num_vouched_tokens, start * self._page_size)
                if first_in_doubt < stop * self._page_size:
                    end = stop * self._page_size
                    yield account, pages.own_indices(slot, account + 1, first_in_doubt, end)
                self._pool.free_bounded(pages.trim(slot, account + 1, stop), account)

    def move_holds(self, slot: int, node: RadixNode) -> None:
        """After give_to_cache, while both nodes are locked. node: the slot's until then."""
        pages, seq_len = self._pages, int(self._table.seq_lens[slot])
        for account, bounded in enumerate(pages.bounded):
            is_seen = self.first_page_seen(account, seq_len) < pages.num_shared[slot]
            if is_seen:
                self._cache.hold(pages.node_of(slot), account)
            if bounded.holds[slot]:
                self._cache.unhold(node, account)
            bounded.holds[slot] = is_seen

    def let_go(self, slot: int) -> None:
        """The slot, which is about to be free, sees nothing any more."""
        for account, bounded in enumerate(self._pages.bounded):
            if bounded.holds[slot]:
                self._cache.unhold(self._pages.node_of(slot), account)


def _write(slot: int, account: int, first_page: int, pages: IntArray) -> TableWrite:
    return TableWrite(np.array([slot], dtype=np.int32), first_page, pages, account + 1)
