"""The radix tree of a model that keeps states: a cached path can be continued only where a snapshot
of them was taken, which is where a node ends.

Snapshots lie in a stock of their own, beside the pages; what a request may still take of it is the
scheduler's matter.
"""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from workers.kv_cache.bounded_pages import Retention
from workers.kv_cache.eviction_order import EvictionHorizon
from workers.kv_cache.prefix_cache import PrefixMatch
from workers.kv_cache.radix_cache import RadixCache
from workers.kv_cache.radix_node import NO_SNAPSHOT, IntArray, RadixNode
from workers.kv_cache.snapshot_stock import SnapshotStock


class SnapshotRadixCache(RadixCache):
    """num_snapshots: places there are; the others as of RadixCache."""

    def __init__(
        self,
        page_size: int,
        clock: Callable[[], int],
        num_snapshots: int,
        retentions: Sequence[Retention] = (),
    ) -> None:
        super().__init__(page_size, clock, retentions)
        self._stock = SnapshotStock(num_snapshots, clock)

    @property
    def num_snapshots(self) -> int:
        return self._stock.num_snapshots

    @property
    def eviction_horizon(self) -> EvictionHorizon:
        """What has no snapshot any more is as good as evicted, whoever shared it."""
        pages, snapshots = super().eviction_horizon, self._stock.last_evicted
        return EvictionHorizon(max(pages.ordinary, snapshots), max(pages.shared, snapshots))

    def take_snapshot(self) -> int | None:
        """A place for one, which is the caller's: free, or of the least recently used one, which
        is lost. None where requests have all."""
        return self._stock.take()

    def give_snapshot_back(self, snapshot: int) -> None:
        """A place that was taken and is not needed."""
        self._stock.give_back(snapshot)

    def attach_snapshot(self, node: RadixNode, num_pages: int, snapshot: int) -> None:
        """What was taken holds the states behind the first num_pages pages of the path to node."""
        self._stock.attach(self._node_at(node, num_pages), snapshot)

    def check_snapshots(self, taken: Iterable[int]) -> None:
        """Raise IntegrityError unless every place is free, in the tree or one of taken, once."""
        self._stock.check_integrity(self._nodes(), taken)

    def _match(self, node: RadixNode, pages: IntArray) -> PrefixMatch:
        has_snapshot = np.zeros(1 + len(pages), dtype=np.bool_)
        has_snapshot[0] = True
        ends = np.cumsum([len(member.pages) for member in node.path()], dtype=np.int64)
        has_snapshot[ends] = [member.snapshot != NO_SNAPSHOT for member in node.path()]
        match = self._resumable_match(node, pages, has_snapshot)
        self._stock.touch(match.node)
        return match._replace(snapshot=match.node.snapshot, num_known_pages=len(pages))

    def _cut_tail(self, leaf: RadixNode, max_pages: int) -> tuple[IntArray, ...]:
        self._stock.forget(leaf)
        return super()._cut_tail(leaf, max_pages)
