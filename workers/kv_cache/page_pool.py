"""Pages for whoever asks: free ones first, then those of cached prefixes that nobody uses."""

from workers.errors import IntegrityError
from workers.kv_cache.page_allocator import PageAllocator
from workers.kv_cache.prefix_cache import PrefixCache
from workers.kv_cache.radix_node import IntArray


class PagePool:
    """The allocator and the prefix cache as one stock of pages."""

    def __init__(self, allocator: PageAllocator, cache: PrefixCache) -> None:
        self._allocator = allocator
        self._cache = cache

    @property
    def num_available_pages(self) -> int:
        """Pages that allocate() could hand out now: free plus evictable."""
        return self._allocator.num_free_pages + self._cache.num_evictable_pages

    @property
    def num_usable_pages(self) -> int:
        return self._allocator.num_usable_pages

    @property
    def num_used_pages(self) -> int:
        """Pages that requests hold, shared ones counted once."""
        return self.num_usable_pages - self.num_available_pages

    def allocate(self, n: int) -> IntArray | None:
        """n pages, int32 (n,), or None when so many are not available; then nothing is evicted."""
        if n > self.num_available_pages:
            return None
        num_missing = n - self._allocator.num_free_pages
        if num_missing > 0:
            self._allocator.free(self._cache.evict(num_missing))
        pages = self._allocator.allocate(n)
        if pages is None:
            raise IntegrityError(
                f"{n} pages were counted as available, {self._allocator.num_free_pages} are"
            )
        return pages

    def free(self, pages: IntArray) -> None:
        self._allocator.free(pages)

    def unowned_pages(self) -> tuple[IntArray, IntArray]:
        """(free pages, pages of the cache), each int32."""
        return self._allocator.free_pages(), self._cache.all_pages()

    def check_integrity(self) -> None:
        self._allocator.check_integrity()
