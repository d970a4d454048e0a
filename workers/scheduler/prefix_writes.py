"""What a plan says of cached prefixes that admitted requests begin with.

Many requests may begin with the same long text: a run of pages that several share is named once,
so that a plan never names more pages than there are. Knows the radix tree's nodes, no requests.
"""

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from workers.kv_cache.radix_node import RadixNode
from workers.scheduler.plan import TableWrite


def prefix_writes(prefixes: Sequence[tuple[int, RadixNode]]) -> list[TableWrite]:
    """The table writes of slots whose requests begin with the path down to a node."""
    paths = [node.path() for _, node in prefixes]
    users: dict[int, list[int]] = {}
    for (slot, _), path in zip(prefixes, paths, strict=True):
        for node in path:
            users.setdefault(id(node), []).append(slot)
    writes: dict[int, TableWrite] = {}
    for path in paths:
        first_page = 0
        # Users only get fewer on the way down: nodes with as many have the same ones.
        for _, run in groupby(path, key=lambda node: len(users[id(node)])):
            nodes = list(run)
            top = id(nodes[0])
            if top not in writes:
                writes[top] = _write(users[top], first_page, nodes)
            first_page += sum(len(node.pages) for node in nodes)
    return list(writes.values())


def _write(slots: list[int], first_page: int, nodes: list[RadixNode]) -> TableWrite:
    pages = np.concatenate([node.pages for node in nodes])
    return TableWrite(np.array(slots, dtype=np.int32), first_page, pages)
