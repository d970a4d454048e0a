"""Proves that no page is lost or shared wrongly. Slow: for tests, idle moments and doubt."""

import numpy as np

from workers.errors import IntegrityError
from workers.kv_cache.page_pool import PagePool
from workers.kv_cache.prefix_cache import PrefixCache
from workers.kv_cache.radix_node import RadixNode
from workers.scheduler.running_table import RunningTable


def check_pages(table: RunningTable, pool: PagePool, cache: PrefixCache) -> None:
    """Raise IntegrityError unless every page is free, or cached, or owned by one request, once.

    Also: the shared part of every request is the cache's path that it locks, and there are no
    other locks.
    """
    pool.check_integrity()
    table.check_integrity()
    holders: list[RadixNode] = []
    free, cached = pool.unowned_pages()
    owned = [free, cached]
    for request in table.requests():
        slot = request.slot
        num_shared, num_pages = int(table.num_shared_pages[slot]), int(table.num_pages[slot])
        owned.append(table.page_table[slot, num_shared:num_pages])
        if request.node is None:
            raise IntegrityError(f"request {request.request_id} runs without a prefix node")
        holders.append(request.node)
        path = request.node.path_pages()
        if not np.array_equal(path, table.page_table[slot, :num_shared]):
            raise IntegrityError(
                f"request {request.request_id} shares {num_shared} pages, which are not the "
                f"{len(path)} of the path that it locks"
            )
    counts = np.bincount(np.concatenate(owned), minlength=pool.num_usable_pages + 1)
    wrong = np.flatnonzero(counts != 1)[1:] if counts[0] == 0 else np.zeros(1, dtype=np.int64)
    if len(wrong):
        raise IntegrityError(
            f"pages {wrong[:8].tolist()} have {counts[wrong][:8].tolist()} owners instead of one: "
            f"{len(free)} free, {len(cached)} cached, {sum(map(len, owned[2:]))} owned by "
            f"{len(holders)} requests, {pool.num_usable_pages} pages in all"
        )
    cache.check_integrity(holders)
