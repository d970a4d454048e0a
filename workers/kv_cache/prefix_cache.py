"""What the scheduler asks of a prefix cache, and the cache that remembers nothing."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from workers.errors import IntegrityError
from workers.kv_cache.eviction_order import EvictionHorizon
from workers.kv_cache.radix_node import EMPTY, NO_SNAPSHOT, IntArray, RadixNode


class PrefixMatch(NamedTuple):
    """pages int32 (n,) hold the first n * page_size tokens; node is what to lock to keep them.

    bounded_pages: of each bounded account int32 (n,), complete from where it is still seen, 0 where
    nothing is kept. snapshot: where the states after these tokens are kept, of a model that has
    any. num_known_pages: how many pages of the tokens such a model's cache has, n of them such that
    one can go on behind them.
    """

    pages: IntArray
    node: RadixNode
    bounded_pages: tuple[IntArray, ...] = ()
    snapshot: int = NO_SNAPSHOT
    num_known_pages: int = 0


class InsertResult(NamedTuple):
    """pages int32 (n,): the cache's own pages for the first n pages of what was inserted.

    Where it differs from the caller's page, the cache already had one and the caller's is a
    duplicate that stays the caller's; where it is equal, the page now belongs to the cache. What
    lies beyond n stays the caller's. node is what to lock to keep pages. bounded_pages: the same of
    each bounded account, 0 where neither had a page.
    """

    pages: IntArray
    node: RadixNode
    bounded_pages: tuple[IntArray, ...] = ()


class PrefixCache(Protocol):
    """Pages of tokens that have been computed, by content. Whole pages only."""

    @property
    def num_evictable_pages(self) -> int:
        """Cached pages that nobody uses now."""
        ...

    def num_evictable_bounded(self, account: int) -> int:
        """Cached pages of a bounded account that nobody can see now."""
        ...

    @property
    def eviction_horizon(self) -> EvictionHorizon:
        """How recently used the prefixes are that have been evicted, in the cache's time."""
        ...

    def match_prefix(self, token_ids: IntArray, salt: str) -> PrefixMatch:
        """The longest cached prefix of token_ids, int32 (any length), under this salt."""
        ...

    def count_return(self, node: RadixNode) -> None:
        """A request begins with what node holds; once a request, however often it looked."""
        ...

    def insert(
        self,
        token_ids: IntArray,
        pages: IntArray,
        salt: str,
        bounded_pages: tuple[IntArray, ...] = (),
    ) -> InsertResult:
        """Offer pages (n,) that hold token_ids (n * page_size,), and those of bounded accounts, 0
        where the caller has none."""
        ...

    def lock(self, node: RadixNode) -> None:
        """Keep the path from the root to node from eviction; counted."""
        ...

    def unlock(self, node: RadixNode) -> None:
        """Undo one lock. Raises IntegrityError when there is none."""
        ...

    def hold(self, node: RadixNode, account: int) -> None:
        """Keep what a request behind a locked node can still see of a bounded account; counted."""
        ...

    def unhold(self, node: RadixNode, account: int) -> None:
        """Undo one hold. Raises IntegrityError when there is none."""
        ...

    def evict(self, num_pages: int) -> tuple[IntArray, ...]:
        """Forget pages that nobody uses; returns at most num_pages, now the caller's, and what each
        bounded account kept of the same tokens."""
        ...

    def evict_bounded(self, num_pages: int, account: int) -> IntArray:
        """Forget pages of a bounded account that nobody can see; returns at most num_pages."""
        ...

    def all_pages(self) -> IntArray:
        """Every page of the cache, int32, in no particular order."""
        ...

    def all_bounded_pages(self, account: int) -> IntArray:
        """Every page of a bounded account, int32, in no particular order."""
        ...

    def check_integrity(
        self,
        holders: Iterable[RadixNode],
        bounded_holders: Sequence[Iterable[RadixNode]] = (),
    ) -> None:
        """Raise IntegrityError unless the locks are exactly one per entry of holders, and the holds
        of each bounded account one per entry of its own."""
        ...


class NoPrefixCache:
    """Finds nothing and takes nothing: every page stays with the request that computed it."""

    def __init__(self, num_bounded: int = 0) -> None:
        self._root = RadixNode.root("")
        self._nothing = (EMPTY,) * num_bounded

    @property
    def num_evictable_pages(self) -> int:
        return 0

    def num_evictable_bounded(self, account: int) -> int:
        return 0

    @property
    def eviction_horizon(self) -> EvictionHorizon:
        return EvictionHorizon()

    def match_prefix(self, token_ids: IntArray, salt: str) -> PrefixMatch:
        return PrefixMatch(EMPTY, self._root, self._nothing)

    def count_return(self, node: RadixNode) -> None:
        """Nothing comes back where nothing is kept."""

    def insert(
        self,
        token_ids: IntArray,
        pages: IntArray,
        salt: str,
        bounded_pages: tuple[IntArray, ...] = (),
    ) -> InsertResult:
        return InsertResult(EMPTY, self._root, self._nothing)

    def lock(self, node: RadixNode) -> None:
        """Nothing to keep."""

    def unlock(self, node: RadixNode) -> None:
        """Nothing was kept."""

    def hold(self, node: RadixNode, account: int) -> None:
        """Nothing to keep."""

    def unhold(self, node: RadixNode, account: int) -> None:
        """Nothing was kept."""

    def evict(self, num_pages: int) -> tuple[IntArray, ...]:
        return EMPTY, *self._nothing

    def evict_bounded(self, num_pages: int, account: int) -> IntArray:
        return EMPTY

    def all_pages(self) -> IntArray:
        return EMPTY

    def all_bounded_pages(self, account: int) -> IntArray:
        return EMPTY

    def check_integrity(
        self,
        holders: Iterable[RadixNode],
        bounded_holders: Sequence[Iterable[RadixNode]] = (),
    ) -> None:
        if any(node is not self._root for node in holders):
            raise IntegrityError("a request holds a prefix of a cache that keeps none")
