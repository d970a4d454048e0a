"""Places for snapshots of states: free ones, those of nodes of the radix tree, and those that were
taken and not yet given back or attached.

A snapshot is what convolutions and recurrences keep after a node's last token. It is evicted by
itself, least recently used first: its node's pages may stay, as the beginning of longer paths.
Knows no state and no request.
"""

from collections.abc import Callable, Iterable

import numpy as np

from workers.errors import IntegrityError
from workers.kv_cache.radix_node import NO_SNAPSHOT, RadixNode


class SnapshotStock:
    """Places 0 .. num_snapshots - 1. clock: as of the tree."""

    def __init__(self, num_snapshots: int, clock: Callable[[], int]) -> None:
        self.num_snapshots = num_snapshots
        self._clock = clock
        self._free = list(range(num_snapshots - 1, -1, -1))
        # By place, the least recently used first: its node, and when it was used.
        self._attached: dict[int, tuple[RadixNode, int]] = {}
        self._last_evicted = -1

    @property
    def last_evicted(self) -> int:
        """When the latest used of those that were evicted was used; -1: none was evicted."""
        return self._last_evicted

    def take(self) -> int | None:
        """A free place, or that of the least recently used snapshot, which is lost. None where all
        are taken."""
        if self._free:
            return self._free.pop()
        if not self._attached:
            return None
        snapshot, (node, used_at) = next(iter(self._attached.items()))
        del self._attached[snapshot]
        node.snapshot = NO_SNAPSHOT
        self._last_evicted = max(self._last_evicted, used_at)
        return snapshot

    def give_back(self, snapshot: int) -> None:
        """Of a place that was taken."""
        self._free.append(snapshot)

    def attach(self, node: RadixNode, snapshot: int) -> None:
        """What was taken holds the states at the end of a node of the tree. Where the node has
        some, they are the same, and the place is given back."""
        if node.snapshot == NO_SNAPSHOT:
            node.snapshot = snapshot
            self._attached[snapshot] = node, self._clock()
        else:
            self.give_back(snapshot)
            self.touch(node)

    def touch(self, node: RadixNode) -> None:
        """The node's snapshot is used now, if it has one."""
        if node.snapshot != NO_SNAPSHOT:
            del self._attached[node.snapshot]
            self._attached[node.snapshot] = node, self._clock()

    def forget(self, node: RadixNode) -> None:
        """The node leaves the tree or ends elsewhere."""
        if node.snapshot != NO_SNAPSHOT:
            del self._attached[node.snapshot]
            self._free.append(node.snapshot)
            node.snapshot = NO_SNAPSHOT

    def check_integrity(self, nodes: Iterable[RadixNode], taken: Iterable[int]) -> None:
        """Raise IntegrityError unless each place is free, of one node of the tree, or one of taken,
        exactly once. nodes: all of the tree."""
        of_nodes = {node.snapshot: node for node in nodes if node.snapshot != NO_SNAPSHOT}
        if of_nodes != {place: node for place, (node, _) in self._attached.items()}:
            raise IntegrityError(
                f"nodes have the snapshots {sorted(of_nodes)}, the stock knows those of "
                f"{sorted(self._attached)}"
            )
        owned = [*self._free, *of_nodes, *taken]
        counts = np.bincount(np.array(owned, dtype=np.int64), minlength=self.num_snapshots)
        wrong = np.flatnonzero(counts != 1)
        if len(wrong):
            raise IntegrityError(
                f"snapshots {wrong[:8].tolist()} have {counts[wrong][:8].tolist()} owners instead "
                f"of one: {len(self._free)} free, {len(of_nodes)} in the tree, "
                f"{self.num_snapshots} in all"
            )
