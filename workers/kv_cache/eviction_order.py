"""Which leaf of the radix tree goes first: of texts that come back about equally often, the least
recently used; texts that come back more often stay longer.

Three kinds of leaf are told apart. Shared: requests went on from it in different ways, such as an
instruction before many questions. Barren: it follows a shared one of whose continuations fewer
than one in LIFETIME_RATIO came back, such as the questions and their answers. Ordinary: all others,
such as a text seen once or a conversation so far, as long as conversations go on. A leaf goes once
it was idle LIFETIME_RATIO times as long as the oldest of the next lower kind. The rule is a ratio
of ages, so that it needs no share of the memory set aside: a flood of texts seen once costs shared
prefixes nothing at first, and prefixes that fell out of use do go. Related to segmented LRU
(Karedla, Love and Wherry 1994), where a second use promotes: here it takes another continuation,
because the turns of a conversation use their beginnings again, too, and a finished conversation is
worth nothing; and to LHD (Beckmann, Chen and Cidon 2018), which ranks by hits expected of an age
and of a class of objects.

Knows no pages and evicts nothing.
"""

import heapq
import itertools
from collections.abc import Callable
from typing import NamedTuple

from workers.kv_cache.radix_node import RadixNode

LIFETIME_RATIO = 8
"""Idle times as long as this many of the kind below are granted to a kind of leaf."""
_KINDS = _BARREN, _ORDINARY, _SHARED = range(3)

_Heap = list[tuple[int, int, RadixNode]]


class EvictionHorizon(NamedTuple):
    """What was last accessed at or before these times has been evicted; -1: nothing has.

    ordinary: of leaves that are not shared, but barren ones go earlier.
    """

    ordinary: int = -1
    shared: int = -1


class EvictionOrder:
    """Leaves by kind and last access, in O(log n) each. clock: the one last_access is read from."""

    def __init__(self, clock: Callable[[], int]) -> None:
        self._clock = clock
        # (last_access, tie-breaker, node): at most one entry a node. An entry may be out of date;
        # take() believes the node, not the entry. Its node was accessed then or later. A leaf that
        # has become of another kind is found out when it gets to the top.
        self._heaps: tuple[_Heap, _Heap, _Heap] = ([], [], [])
        self._sequence = itertools.count()
        self._taken = [-1, -1, -1]

    @property
    def horizon(self) -> EvictionHorizon:
        return EvictionHorizon(self._taken[_ORDINARY], self._taken[_SHARED])

    def offer(self, node: RadixNode) -> None:
        """The node may have become an unlocked leaf."""
        if node.is_evictable_leaf and not node.is_queued:
            node.is_queued = True
            entry = (node.last_access, next(self._sequence), node)
            heapq.heappush(self._heaps[_kind(node)], entry)

    def take(self) -> RadixNode | None:
        """The leaf that the caller evicts now, in whole or in part; it stays here until it is
        locked, detached or a parent."""
        # All before any is looked at: a leaf may move to a heap that was in order already.
        for kind in _KINDS:
            self._bring_up_to_date(kind)
        now = self._clock()
        taken, taken_kind, longest = None, 0, -1
        for kind in _KINDS:
            longest *= LIFETIME_RATIO
            if self._heaps[kind]:
                leaf = self._heaps[kind][0][2]
                if taken is None or now - leaf.last_access > longest:
                    taken, taken_kind, longest = leaf, kind, now - leaf.last_access
        if taken is not None:
            self._taken[taken_kind] = max(self._taken[taken_kind], taken.last_access)
        return taken

    def _bring_up_to_date(self, kind: int) -> None:
        """Afterwards the heap is empty or its top says the truth about a leaf of this kind."""
        heap = self._heaps[kind]
        while heap:
            access, _, node = heap[0]
            if node.is_evictable_leaf and access == node.last_access and _kind(node) == kind:
                return
            heapq.heappop(heap)
            node.is_queued = False
            self.offer(node)


def _kind(node: RadixNode) -> int:
    if node.is_shared:
        return _SHARED
    above = node.parent
    while above is not None and not above.is_shared:
        above = above.parent
    if above is None or above.parent is None:
        return _ORDINARY
    is_barren = above.num_continuations > LIFETIME_RATIO * (above.num_returns + 1)
    return _BARREN if is_barren else _ORDINARY
