"""The pages of running requests: taking them, sharing them with the prefix cache, giving them back.

A page belongs to exactly one of: the free stock, the prefix cache, one request.

Keys and values are known to be numbers once a final state that attended to them is: that of a
chunk's last token, or what logits were made of. Those of a request that ends before that are never
shared, and are cleared before their pages serve anybody else: an attention kernel may load a page's
unused tail and multiply it by zero, and NaN times zero is NaN.

    page_table[slot]:  | shared: the cache's, locked by node | the request's own | unused |
                       0                          num_shared_pages          num_pages
"""

import numpy as np

from workers.kv_cache.page_pool import PagePool
from workers.kv_cache.prefix_cache import PrefixCache, PrefixMatch
from workers.kv_cache.radix_node import EMPTY
from workers.scheduler.plan import IntArray, TableWrite
from workers.scheduler.request import Request
from workers.scheduler.running_table import RunningTable


class RequestMemory:
    """Moves pages between the pool, the cache and the running table."""

    def __init__(self, table: RunningTable, pool: PagePool, cache: PrefixCache) -> None:
        self._table = table
        self._pool = pool
        self._cache = cache
        self._page_size = table.page_size
        self._table_writes: dict[int, TableWrite] = {}
        self._cleared: list[IntArray] = []

    def match_and_lock(self, request: Request) -> PrefixMatch:
        """The cached prefix of the request's tokens, locked; at least one token is left to compute.

        A request that wants prompt log probabilities computes its whole prompt.
        """
        num_matchable = 0 if request.wants_prompt_logprobs else request.num_tokens - 1
        match = self._cache.match_prefix(request.buffer[:num_matchable], request.cache_salt)
        self._cache.lock(match.node)
        return match

    def unlock(self, match: PrefixMatch) -> None:
        self._cache.unlock(match.node)

    def count_return(self, match: PrefixMatch) -> None:
        """The request that found this match is admitted for the first time."""
        self._cache.count_return(match.node)

    def open(self, request: Request, match: PrefixMatch) -> None:
        """Give the request a slot that starts with the locked match."""
        request.node = match.node
        request.prefill_len = request.num_tokens
        request.num_vouched_tokens = len(match.pages) * self._page_size
        self._table.add(request, match.pages)

    def extend(self, slot: int, num_tokens: int) -> int:
        """Make room for up to num_tokens more tokens; returns for how many there is.

        seq_lens grows by as much.
        """
        table, page_size = self._table, self._page_size
        seq_len, num_pages = int(table.seq_lens[slot]), int(table.num_pages[slot])
        max_len = (num_pages + self._pool.num_available_pages) * page_size
        num_granted = min(num_tokens, max_len - seq_len)
        num_new_pages = -(-(seq_len + num_granted) // page_size) - num_pages
        pages = self._pool.allocate(num_new_pages)
        if pages is None:
            return 0
        table.append_pages(slot, pages)
        table.seq_lens[slot] = seq_len + num_granted
        return num_granted

    def share_prefix(self, request: Request) -> None:
        """Offer the full pages of a finished prefill to the cache, so that others can use them.

        Where the cache already has a page of the same tokens, the request moves to it with the
        next plan. A step under way may still read the pages that are freed here: whoever gets them
        writes to them in a later step.
        """
        table, slot, page_size = self._table, request.slot, self._page_size
        num_full = request.prefill_len // page_size
        num_shared = int(table.num_shared_pages[slot])
        if num_full <= num_shared or request.node is None:
            return
        tokens = request.buffer[: num_full * page_size]
        pages = table.page_table[slot, :num_full]
        result = self._cache.insert(tokens, pages, request.cache_salt)
        num_cached = len(result.pages)
        duplicates = np.flatnonzero(pages[:num_cached] != result.pages)
        if len(duplicates):
            self._pool.free(pages[duplicates])
            table.page_table[slot, :num_cached] = result.pages
            first, last = int(duplicates[0]), int(duplicates[-1])
            moved = result.pages[first : last + 1]
            self._table_writes[slot] = TableWrite(np.array([slot], dtype=np.int32), first, moved)
        table.num_shared_pages[slot] = max(num_cached, num_shared)
        self._cache.lock(result.node)
        self._cache.unlock(request.node)
        request.node = result.node

    def release(self, request: Request) -> None:
        """Take the request's slot and pages; full pages of vouched tokens go to the cache."""
        table, slot, page_size = self._table, request.slot, self._page_size
        num_full = request.num_vouched_tokens // page_size
        num_shared = int(table.num_shared_pages[slot])
        pages = table.page_table[slot, : int(table.num_pages[slot])].copy()
        num_cached = num_shared
        if num_full > num_shared:
            tokens = request.buffer[: num_full * page_size]
            result = self._cache.insert(tokens, pages[:num_full], request.cache_salt)
            num_cached = len(result.pages)
            self._pool.free(pages[:num_cached][pages[:num_cached] != result.pages])
        self._clear_from(slot, request.num_vouched_tokens)
        self._close(request, pages[num_cached:])

    def discard(self, request: Request) -> None:
        """Take the slot and pages of a request whose keys and values nobody may read again."""
        table, slot = self._table, request.slot
        first, last = int(table.num_shared_pages[slot]), int(table.num_pages[slot])
        self._clear_from(slot, first * self._page_size)
        self._close(request, table.page_table[slot, first:last].copy())

    def _clear_from(self, slot: int, first_token: int) -> None:
        """Steps under way may still write there; what is cleared is cleared after them."""
        seq_len = int(self._table.seq_lens[slot])
        if seq_len > first_token:
            self._cleared.append(self._table.cache_indices(slot, first_token, seq_len))

    def _close(self, request: Request, unwanted_pages: IntArray) -> None:
        self._pool.free(unwanted_pages)
        if request.node is not None:
            self._cache.unlock(request.node)
            request.node = None
        self._table_writes.pop(request.slot, None)
        self._table.remove(request)

    def take_table_writes(self) -> list[TableWrite]:
        """Moves to shared pages that the next plan must carry out."""
        writes = list(self._table_writes.values())
        self._table_writes.clear()
        return writes

    def take_cleared(self) -> IntArray:
        """Cache indices that the next plan must clear, int32 (n,): it is the first that may hand
        their pages to somebody else."""
        if not self._cleared:
            return EMPTY
        cleared = np.concatenate(self._cleared)
        self._cleared.clear()
        return cleared
