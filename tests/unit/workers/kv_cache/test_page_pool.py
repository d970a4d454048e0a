"""PagePool: free pages first, cached ones when these run out."""

import itertools

import numpy as np
import pytest

from workers.kv_cache.page_allocator import PageAllocator
from workers.kv_cache.page_pool import PagePool
from workers.kv_cache.radix_cache import RadixCache


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache(1, clock=itertools.count(1).__next__)


@pytest.fixture
def pool(cache: RadixCache) -> PagePool:
    return PagePool([PageAllocator(num_pages=6, page_size=1)], cache)


def fill(pool: PagePool, cache: RadixCache, n: int) -> np.ndarray:
    granted = pool.allocate(n)
    assert granted is not None
    cache.insert(np.arange(n, dtype=np.int32), granted[0], "")
    return granted[0]


def test_cached_pages_stay_while_there_are_free_ones(pool: PagePool, cache: RadixCache):
    fill(pool, cache, 3)
    assert pool.num_available_pages == 5
    pool.allocate(2)
    assert cache.num_evictable_pages == 3


def test_only_as_many_pages_are_evicted_as_are_missing(pool: PagePool, cache: RadixCache):
    fill(pool, cache, 3)
    granted = pool.allocate(4)
    assert granted is not None
    assert len(granted[0]) == 4
    assert cache.num_evictable_pages == 1
    assert (pool.num_available_pages, pool.num_used_pages) == (1, 4)


def test_nothing_is_evicted_for_a_request_that_cannot_be_met(pool: PagePool, cache: RadixCache):
    fill(pool, cache, 3)
    pool.allocate(2)
    assert pool.allocate(4) is None
    assert cache.num_evictable_pages == 3


def test_locked_pages_count_as_used(pool: PagePool, cache: RadixCache):
    fill(pool, cache, 3)
    cache.lock(cache.match_prefix(np.arange(2, dtype=np.int32), "").node)
    assert (pool.num_available_pages, pool.num_used_pages) == (3, 2)
    assert pool.allocate(4) is None
