"""Pages for whoever asks: free ones first, then those of cached prefixes that nobody uses.

Account 0 keeps every token; the others' retentions are bounded. A page of tokens takes one page of
each, so that the pool grants all accounts or none. Pages are numbered by account.
"""

from collections.abc import Sequence
from typing import NamedTuple

from workers.errors import IntegrityError
from workers.kv_cache.page_allocator import PageAllocator
from workers.kv_cache.prefix_cache import PrefixCache
from workers.kv_cache.radix_node import IntArray


class PageCounts(NamedTuple):
    """Pages of an account: all that can be handed out, those that requests hold, and cached ones
    that nobody uses."""

    num_usable: int
    num_used: int
    num_evictable: int


class PagePool:
    """The allocators and the prefix cache as one stock of pages.

    allocators: of account 0, then of each bounded account.
    """

    def __init__(self, allocators: Sequence[PageAllocator], cache: PrefixCache) -> None:
        self._allocators = tuple(allocators)
        self._main = self._allocators[0]
        self._num_bounded = len(self._allocators) - 1
        self._cache = cache

    @property
    def num_available_pages(self) -> int:
        """Pages that allocate() could hand out now: free plus evictable, in every account."""
        available = self.num_available_main
        for account in range(self._num_bounded):
            available = min(available, self.num_available_bounded(account))
        return available

    @property
    def num_available_main(self) -> int:
        """As num_available_pages, of account 0 alone."""
        return self._main.num_free_pages + self._cache.num_evictable_pages

    def num_available_bounded(self, account: int) -> int:
        """As num_available_pages, of one bounded account, which are counted from 0."""
        free = self._allocators[account + 1].num_free_pages
        return free + self._cache.num_evictable_bounded(account)

    @property
    def num_usable_pages(self) -> int:
        """Of account 0."""
        return self._main.num_usable_pages

    @property
    def num_used_pages(self) -> int:
        """Pages of account 0 that requests hold, shared ones counted once."""
        return self.num_usable_pages - self.num_available_main

    @property
    def num_evictable_pages(self) -> int:
        """Cached pages of account 0 that nobody uses now."""
        return self._cache.num_evictable_pages

    def counts(self) -> list[PageCounts]:
        """Of every account."""
        counts = [PageCounts(self.num_usable_pages, self.num_used_pages, self.num_evictable_pages)]
        for account in range(self._num_bounded):
            evictable = self._cache.num_evictable_bounded(account)
            usable, used = self.num_usable_bounded(account), self.num_used_bounded(account)
            counts.append(PageCounts(usable, used, evictable))
        return counts

    def num_usable_bounded(self, account: int) -> int:
        return self._allocators[account + 1].num_usable_pages

    def num_used_bounded(self, account: int) -> int:
        return self.num_usable_bounded(account) - self.num_available_bounded(account)

    def allocate(self, n: int) -> tuple[IntArray, ...] | None:
        """n pages of every account, int32 (n,) each, or None when so many are not available in all
        of them; then nothing is evicted."""
        if any(allocator.num_free_pages < n for allocator in self._allocators):
            if n > self.num_available_pages:
                return None
            self._evict_until_free(n)
        return tuple(self._take(allocator, n) for allocator in self._allocators)

    def forget_cached(self) -> None:
        """Free every cached page that nobody uses."""
        self.free(self._cache.evict(self._cache.num_evictable_pages))

    def _evict_until_free(self, n: int) -> None:
        """So many pages of every account, which are available."""
        num_missing = n - self._main.num_free_pages
        if num_missing > 0:
            self.free(self._cache.evict(num_missing))
        for account in range(self._num_bounded):
            allocator = self._allocators[account + 1]
            num_missing = n - allocator.num_free_pages
            if num_missing > 0:
                allocator.free(self._cache.evict_bounded(num_missing, account))

    def free(self, pages: Sequence[IntArray]) -> None:
        """Take pages back: of account 0, then of each bounded account."""
        for allocator, of_account in zip(self._allocators, pages, strict=True):
            allocator.free(of_account)

    def free_bounded(self, pages: IntArray, account: int) -> None:
        self._allocators[account + 1].free(pages)

    def unowned_pages(self) -> tuple[IntArray, IntArray]:
        """(free pages, pages of the cache) of account 0, each int32."""
        return self._main.free_pages(), self._cache.all_pages()

    def unowned_bounded(self, account: int) -> tuple[IntArray, IntArray]:
        """As unowned_pages, of one bounded account."""
        free = self._allocators[account + 1].free_pages()
        return free, self._cache.all_bounded_pages(account)

    def check_integrity(self) -> None:
        for allocator in self._allocators:
            allocator.check_integrity()

    def _take(self, allocator: PageAllocator, n: int) -> IntArray:
        pages = allocator.allocate(n)
        if pages is None:
            raise IntegrityError(
                f"{n} pages were counted as available, {allocator.num_free_pages} are"
            )
        return pages
