"""Which leaf of the radix tree goes first: the least recently used, but shared prefixes later.

A node that requests went on from in different ways, such as an instruction before many questions,
is shared; what only one text went through, such as a question, its answer or a conversation so
far, is not. A shared leaf goes before the others only once it has been idle SHARED_LIFETIME times
as long as the least recently used of them. The rule is a ratio of ages, so that it needs no share
of the memory set aside: a flood of texts seen once costs shared prefixes nothing at first, and
prefixes that fell out of use do go. Related to segmented LRU (Karedla, Love and Wherry 1994),
where a second use promotes: here it takes another continuation, because the turns of a
conversation use their beginnings again, too, and a finished conversation is worth nothing.

Knows no pages and evicts nothing.
"""

import heapq
import itertools
from collections.abc import Callable

from workers.kv_cache.radix_node import RadixNode

SHARED_LIFETIME = 8
"""Idle times as long as this many of the oldest unshared leaf's are granted to shared prefixes."""

_Heap = list[tuple[int, int, RadixNode]]


class EvictionOrder:
    """Leaves by last access, in O(log n) each. clock: the one that last_access is read from."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        # (last_access, tie-breaker, node): at most one entry a node. An entry may be out of date;
        # first() believes the node, not the entry. Its node was accessed then or later.
        self._unshared: _Heap = []
        self._shared: _Heap = []
        self._sequence = itertools.count()

    def offer(self, node: RadixNode) -> None:
        """The node may have become an unlocked leaf."""
        if node.is_evictable_leaf and not node.is_queued:
            node.is_queued = True
            heap = self._shared if node.is_shared else self._unshared
            heapq.heappush(heap, (node.last_access, next(self._sequence), node))

    def first(self) -> RadixNode | None:
        """The leaf that is to go next; it stays here until it is locked, detached or a parent."""
        unshared, shared = self._oldest(self._unshared), self._oldest(self._shared)
        if unshared is None or shared is None:
            return unshared or shared
        now = self._clock()
        granted = SHARED_LIFETIME * (now - unshared.last_access)
        return shared if now - shared.last_access > granted else unshared

    def _oldest(self, heap: _Heap) -> RadixNode | None:
        """Bring the top up to date."""
        while heap:
            access, _, node = heap[0]
            is_misplaced = node.is_shared and heap is self._unshared
            if node.is_evictable_leaf and access == node.last_access and not is_misplaced:
                return node
            heapq.heappop(heap)
            node.is_queued = False
            self.offer(node)
        return None
