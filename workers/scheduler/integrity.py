"""Proves that no page is lost or shared wrongly. Slow: for tests, idle moments and doubt."""

import numpy as np

from workers.errors import IntegrityError
from workers.kv_cache.page_pool import PagePool
from workers.kv_cache.prefix_cache import PrefixCache
from workers.kv_cache.radix_node import IntArray, RadixNode
from workers.scheduler.bounded_memory import BoundedMemory
from workers.scheduler.running_table import RunningTable


def check_pages(
    table: RunningTable, pool: PagePool, cache: PrefixCache, bounded: BoundedMemory
) -> None:
    """Raise IntegrityError unless every page is free, or cached, or owned by one request, once.

    Also: the shared part of every slot is the cache's path that it locks, and there are no other
    locks.
    """
    pool.check_integrity()
    table.check_integrity()
    slots = [request.slot for request in table.requests()]
    owned = [*pool.unowned_pages(), *(table.pages.own_pages(slot, 0) for slot in slots)]
    _check_owners(owned, pool.num_usable_pages, "")
    holders = [table.pages.node_of(slot) for slot in slots]
    bounded_holders = [
        _check_bounded(table, pool, bounded, account) for account in range(bounded.num_accounts)
    ]
    cache.check_integrity(holders, bounded_holders)


def _check_bounded(
    table: RunningTable, pool: PagePool, memory: BoundedMemory, account: int
) -> list[RadixNode]:
    """The same of one account with a bounded retention; returns the node of every hold.

    A request that still sees cached tokens has the pages that the cache keeps of them.
    """
    pages, bounded = table.pages, table.pages.bounded[account]
    owned = [*pool.unowned_bounded(account)]
    holders: list[RadixNode] = []
    for request in table.requests():
        slot = request.slot
        owned.append(pages.own_pages(slot, account + 1))
        if not bounded.holds[slot]:
            continue
        node = pages.node_of(slot)
        holders.append(node)
        first = memory.first_page_seen(account, int(table.seq_lens[slot]))
        seen = node.path_bounded_pages(account)[first:]
        own = bounded.page_table[slot, first : int(pages.num_shared[slot])]
        if not np.array_equal(seen, own) or not own.all():
            raise IntegrityError(
                f"request {request.request_id} sees pages {own.tolist()} of account {account}, the "
                f"cache keeps {seen.tolist()}"
            )
    _check_owners(owned, pool.num_usable_bounded(account), f"of bounded account {account} ")
    return holders


def _check_owners(owned: list[IntArray], num_usable: int, which: str) -> None:
    """owned: free pages, cached ones, then those of each request."""
    counts = np.bincount(np.concatenate(owned), minlength=num_usable + 1)
    wrong = np.flatnonzero(counts != 1)[1:] if counts[0] == 0 else np.zeros(1, dtype=np.int64)
    if len(wrong):
        raise IntegrityError(
            f"pages {wrong[:8].tolist()} {which}have {counts[wrong][:8].tolist()} owners instead "
            f"of one: {len(owned[0])} free, {len(owned[1])} cached, {sum(map(len, owned[2:]))} "
            f"owned by {len(owned) - 2} requests, {num_usable} pages in all"
        )
