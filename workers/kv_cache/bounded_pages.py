"""Cached pages of an account whose tokens are visible for a while only: windows, chunks.

The tree keeps a path's tokens for as long as the account that keeps every token does. A bounded
account may have lost pages of any node: a cached path can be resumed at a page border only if all
that a query there can see is still kept. A node is held while somebody runs on top of it who may
still see its tokens; pages that nobody holds are evicted by last access, a node's oldest first, so
that its end stays resumable longest. Holds end at page borders where nodes begin: a hold splits the
node that it would hold in part. Owns no free pages. Related: SGLang's radix cache for sliding
windows, which leaves such gaps as tombstones.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

import numpy as np

from attention.memory.layout import Position
from workers.errors import IntegrityError
from workers.kv_cache.radix_node import EMPTY, IntArray, RadixNode

Split = Callable[[RadixNode, int], RadixNode]
"""Puts a node of so many of a node's pages above it."""


class Retention(Protocol):
    """attention.memory.layout has the kinds there are."""

    @property
    def name(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Most tokens that one query sees."""
        ...

    def first_visible(self, position: Position) -> Position:
        """The first position that the query at position, or any later one, may see."""
        ...


def span_pages(retention: Retention, page_size: int) -> int:
    """Most pages that one query sees, wherever its page begins."""
    return -(-retention.num_tokens // page_size) + 1


class BoundedPages:
    """account: which of a node's bounded_pages, holds and is_offered are this account's."""

    def __init__(self, account: int, retention: Retention, page_size: int) -> None:
        self._account = account
        self._retention = retention
        self._page_size = page_size
        # (last_access, tie-breaker, node), at most one entry a node; it may be out of date.
        self._heap: list[tuple[int, int, RadixNode]] = []
        self._sequence = itertools.count()
        # Entries whose node has left the tree.
        self._num_gone = 0
        self.num_evictable_pages = 0

    def resumable(self, pages: IntArray) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """For each number of pages 0 .. n of a path, whether one can go on behind them.

        pages: the path's, int32 (n,), 0 where nothing is kept.
        """
        ends = np.arange(len(pages) + 1, dtype=np.int64)
        seen = self._retention.first_visible(ends * self._page_size) // self._page_size
        gaps = np.where(pages == 0, ends[:-1], -1)
        last_gap = np.concatenate([[-1], np.maximum.accumulate(gaps)])
        can_resume: np.ndarray[tuple[int], np.dtype[np.bool_]] = (last_gap < seen) | (seen == ends)
        return can_resume

    def hold(self, node: RadixNode, split: Split) -> None:
        """Keep what a request that goes on behind node can see; counted."""
        account = self._account
        for member in self._seen_from(node, split):
            if member.holds[account] == 0:
                self.num_evictable_pages -= self._num_kept(member)
            member.holds[account] += 1

    def unhold(self, node: RadixNode) -> None:
        """Undo one hold. Raises IntegrityError where there is none."""
        account = self._account
        for member in self._seen_from(node, _refuse_split):
            if member.holds[account] == 0:
                raise IntegrityError("a node's bounded pages were let go more often than held")
            member.holds[account] -= 1
            if member.holds[account] == 0:
                self.num_evictable_pages += self._num_kept(member)
                self.offer(member)

    def offer(self, node: RadixNode) -> None:
        """The node may have got pages that nobody holds."""
        if self._is_evictable(node) and not node.is_offered[self._account]:
            node.is_offered[self._account] = True
            heapq.heappush(self._heap, (node.last_access, next(self._sequence), node))

    def fill(self, node: RadixNode, pages: IntArray) -> None:
        """The node, in the tree, takes pages, int32 (n,), where it keeps none; 0 is no page."""
        kept = node.bounded_pages[self._account]
        missing = (kept == 0) & (pages != 0)
        kept[missing] = pages[missing]
        if node.holds[self._account] == 0:
            self.num_evictable_pages += int(np.count_nonzero(missing))
        self.offer(node)

    def take_tail(self, leaf: RadixNode, num_pages: int) -> IntArray:
        """The pages kept of the last num_pages of a leaf that leaves the tree, held by nobody."""
        tail = leaf.bounded_pages[self._account][len(leaf.pages) - num_pages :]
        taken: IntArray = tail[tail != 0]
        self.num_evictable_pages -= len(taken)
        return taken

    def forget(self, node: RadixNode) -> None:
        """The node has left the tree. Most entries are of nodes that have not."""
        if not node.is_offered[self._account]:
            return
        self._num_gone += 1
        if 2 * self._num_gone > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].parent is not None]
            heapq.heapify(self._heap)
            self._num_gone = 0

    def evict(self, num_pages: int) -> IntArray:
        """Forget pages that nobody holds: int32, min(num_pages, num_evictable_pages) of them."""
        freed: list[IntArray] = []
        missing = num_pages
        while missing > 0:
            node = self._oldest()
            if node is None:
                break
            pages = node.bounded_pages[self._account]
            places = np.flatnonzero(pages)[:missing]
            freed.append(pages[places])
            pages[places] = 0
            missing -= len(places)
        num_freed = num_pages - missing
        self.num_evictable_pages -= num_freed
        return np.concatenate(freed) if freed else EMPTY

    def check_integrity(self, nodes: Iterable[RadixNode], holders: Iterable[RadixNode]) -> None:
        """nodes: all of the tree. holders: the node of every hold, one entry a hold."""
        expected: dict[int, int] = {}
        for holder in holders:
            for member in self._seen_from(holder, _refuse_split):
                expected[id(member)] = expected.get(id(member), 0) + 1
        num_evictable = 0
        for node in nodes:
            num_holds, num_users = node.holds[self._account], expected.pop(id(node), 0)
            if num_holds != num_users or num_holds > node.lock_count:
                raise IntegrityError(f"a node is held {num_holds} times by {num_users} users")
            if len(node.bounded_pages[self._account]) != len(node.pages):
                raise IntegrityError("a node's accounts differ in their number of pages")
            if self._is_evictable(node):
                num_evictable += self._num_kept(node)
                if not node.is_offered[self._account]:
                    raise IntegrityError("pages that nobody holds are out of reach of eviction")
        if expected:
            raise IntegrityError(f"{len(expected)} held nodes are no longer in the tree")
        if num_evictable != self.num_evictable_pages:
            raise IntegrityError(
                f"{num_evictable} bounded pages are evictable, {self.num_evictable_pages} counted"
            )

    def _seen_from(self, node: RadixNode, split: Split) -> Iterator[RadixNode]:
        """The nodes up from node that whoever goes on behind it can see, none of them in part."""
        position = node.num_path_pages()
        first = self._retention.first_visible(position * self._page_size) // self._page_size
        while node.parent is not None and position > first:
            start = position - len(node.pages)
            if start < first:
                split(node, first - start)
                start = first
            position = start
            above = node.parent
            yield node
            node = above

    def _num_kept(self, node: RadixNode) -> int:
        return int(np.count_nonzero(node.bounded_pages[self._account]))

    def _is_evictable(self, node: RadixNode) -> bool:
        account = self._account
        return (
            node.parent is not None
            and node.holds[account] == 0
            and bool(node.bounded_pages[account].any())
        )

    def _oldest(self) -> RadixNode | None:
        while self._heap:
            access, _, node = self._heap[0]
            if self._is_evictable(node) and access == node.last_access:
                return node
            heapq.heappop(self._heap)
            self._num_gone -= node.parent is None
            node.is_offered[self._account] = False
            self.offer(node)
        return None


def _refuse_split(node: RadixNode, num_pages: int) -> RadixNode:
    raise IntegrityError(f"a hold begins {num_pages} pages inside a node")
