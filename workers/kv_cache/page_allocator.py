"""Hands out KV pages by number. Knows neither what is on a page nor who holds it."""

import numpy as np
import numpy.typing as npt

from workers.errors import ConfigError, IntegrityError

IntArray = npt.NDArray[np.int32]


class PageAllocator:
    """Free pages 1 .. num_pages - 1 as a stack in one array.

    Page 0 is never handed out: padding rows write there. A cache index is
    page * page_size + offset.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 2:
            raise ConfigError(f"num_pages must be at least 2 (page 0 is reserved), got {num_pages}")
        if page_size < 1:
            raise ConfigError(f"page_size must be at least 1, got {page_size}")
        self.num_pages = num_pages
        self.page_size = page_size
        # The top of the stack is at the end; low page numbers go first.
        self._stack: IntArray = np.arange(num_pages - 1, 0, -1, dtype=np.int32)
        self._num_free = num_pages - 1
        self._is_free = np.ones(num_pages, dtype=np.bool_)
        self._is_free[0] = False
        self._scratch: IntArray = np.zeros(num_pages, dtype=np.int32)

    @property
    def num_usable_pages(self) -> int:
        """All pages that can ever be handed out."""
        return self.num_pages - 1

    @property
    def num_free_pages(self) -> int:
        return self._num_free

    def allocate(self, n: int) -> IntArray | None:
        """n pages, int32 (n,), or None when fewer than n are free; then nothing changes."""
        if n > self._num_free:
            return None
        start = self._num_free - n
        pages = self._stack[start : self._num_free][::-1].copy()
        self._num_free = start
        self._is_free[pages] = False
        return pages

    def free(self, pages: IntArray) -> None:
        """Take pages back.

        Raises IntegrityError, and takes none, when a page is not one of ours, is already free or
        occurs twice.
        """
        n = len(pages)
        if n == 0:
            return
        self._check_can_free(pages)
        self._stack[self._num_free : self._num_free + n] = pages
        self._num_free += n
        self._is_free[pages] = True

    def free_pages(self) -> IntArray:
        """A copy of the free pages, in no particular order, int32 (num_free_pages,)."""
        return self._stack[: self._num_free].copy()

    def check_integrity(self) -> None:
        """Raise IntegrityError unless stack and flags tell the same."""
        stack = self._stack[: self._num_free]
        if len(np.unique(stack)) != self._num_free or not self._is_free[stack].all():
            raise IntegrityError(f"the stack of {self._num_free} free pages holds a page twice")
        num_flagged = int(np.count_nonzero(self._is_free))
        if num_flagged != self._num_free or self._is_free[0]:
            raise IntegrityError(f"{num_flagged} pages are flagged free, {self._num_free} stacked")

    def _check_can_free(self, pages: IntArray) -> None:
        low, high = int(pages.min()), int(pages.max())
        if low < 1 or high >= self.num_pages:
            raise IntegrityError(
                f"cannot free page {low if low < 1 else high}: pages are 1 to {self.num_pages - 1}"
            )
        already_free = pages[self._is_free[pages]]
        if len(already_free):
            raise IntegrityError(f"double free of pages {already_free[:8].tolist()}")
        # Of two equal pages the later write wins, so that the earlier one reads a foreign rank.
        ranks = np.arange(len(pages), dtype=np.int32)
        self._scratch[pages] = ranks
        repeated = pages[self._scratch[pages] != ranks]
        if len(repeated):
            raise IntegrityError(f"pages {repeated[:8].tolist()} occur twice in one free")
