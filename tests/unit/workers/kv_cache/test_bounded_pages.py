"""What the tree keeps for accounts that see tokens for a while only: gaps, holds, evictions."""

import itertools

import numpy as np
import pytest

from attention.memory.layout import CurrentChunk, LastTokens
from tests.unit.workers.kv_cache.caches import ints
from workers.errors import IntegrityError
from workers.kv_cache.radix_cache import RadixCache

TEXT = list(range(100, 116))


def make_cache(*retentions, page_size: int = 2) -> RadixCache:
    return RadixCache(page_size, itertools.count(1).__next__, retentions)


def fill(cache: RadixCache, tokens: list[int], *bounded: list[int], first_page: int = 10):
    """Pages first_page, first_page + 1, ... of account 0."""
    num_pages = len(tokens) // 2
    pages = ints(range(first_page, first_page + num_pages))
    return cache.insert(ints(tokens), pages, "", tuple(map(ints, bounded)))


def num_found(cache: RadixCache, tokens: list[int] = TEXT) -> int:
    return len(cache.match_prefix(ints(tokens), "").pages)


def check(cache: RadixCache, held: list, locked: list | None = None) -> None:
    cache.check_integrity(held if locked is None else locked, [held])


def test_a_path_is_resumed_where_all_that_is_seen_is_kept() -> None:
    cache = make_cache(LastTokens(5))
    # A query at token 2p sees the 4 tokens before it: two pages.
    fill(cache, TEXT, [0, 1, 2, 0, 3, 4, 5, 0])
    match = cache.match_prefix(ints(TEXT), "")
    assert match.pages.tolist() == [10, 11, 12, 13, 14, 15, 16]
    assert match.bounded_pages[0].tolist() == [0, 1, 2, 0, 3, 4, 5]
    assert num_found(cache, TEXT[:12]) == 6
    assert num_found(cache, TEXT[:10]) == 3, "behind five pages the fourth would be seen"
    assert num_found(cache, TEXT[:4]) == 0
    check(cache, [])


def test_a_chunks_begin_is_resumed_without_any_page() -> None:
    cache = make_cache(CurrentChunk(4))
    fill(cache, TEXT, [0, 0, 0, 0, 0, 0, 0, 0])
    assert [num_found(cache, TEXT[:n]) for n in (2, 4, 6, 8, 16)] == [0, 2, 2, 4, 8]


def test_every_account_must_be_able_to_go_on() -> None:
    cache = make_cache(LastTokens(3), CurrentChunk(8))
    fill(cache, TEXT, [1, 2, 3, 4, 5, 6, 0, 0], [0, 0, 0, 0, 1, 2, 3, 4])
    assert num_found(cache) == 6


def test_the_tree_takes_what_it_lacks_and_leaves_what_it_has() -> None:
    cache = make_cache(LastTokens(3))
    fill(cache, TEXT[:8], [0, 0, 3, 4])
    result = fill(cache, TEXT[:8], [0, 6, 7, 8], first_page=30)
    assert result.pages.tolist() == [10, 11, 12, 13]
    assert result.bounded_pages[0].tolist() == [0, 6, 3, 4]
    assert cache.num_evictable_bounded(0) == 3
    assert sorted(cache.all_bounded_pages(0).tolist()) == [3, 4, 6]
    check(cache, [])


def test_what_is_held_stays_and_what_lies_before_it_goes_oldest_first() -> None:
    cache = make_cache(LastTokens(5))
    result = fill(cache, TEXT, [1, 2, 3, 4, 5, 6, 7, 8])
    cache.lock(result.node)
    cache.hold(result.node, 0)
    assert cache.num_evictable_bounded(0) == 6
    check(cache, [result.node])
    assert cache.evict_bounded(4, 0).tolist() == [1, 2, 3, 4]
    assert cache.evict_bounded(9, 0).tolist() == [5, 6]
    assert cache.evict_bounded(1, 0).tolist() == []
    assert num_found(cache) == 8
    cache.unhold(result.node, 0)
    cache.unlock(result.node)
    assert cache.evict_bounded(9, 0).tolist() == [7, 8]
    assert num_found(cache) == 0
    assert cache.num_evictable_pages == 8
    check(cache, [])


def test_a_hold_outlives_splits_of_what_it_holds() -> None:
    cache = make_cache(LastTokens(5))
    node = fill(cache, TEXT, [1, 2, 3, 4, 5, 6, 7, 8]).node
    cache.lock(node)
    cache.hold(node, 0)
    fill(cache, TEXT[:14] + [0, 0], [0, 0, 0, 0, 0, 0, 0, 9], first_page=30)
    check(cache, [node])
    cache.unhold(node, 0)
    cache.unlock(node)
    check(cache, [])
    assert cache.num_evictable_bounded(0) == 9


def test_the_longest_unused_goes_first() -> None:
    cache = make_cache(LastTokens(3))
    fill(cache, TEXT[:4], [1, 2])
    fill(cache, [7, 7, 7, 7], [3, 4], first_page=20)
    num_found(cache, TEXT[:4])
    assert cache.evict_bounded(3, 0).tolist() == [3, 4, 1]


def test_pages_of_an_evicted_leaf_come_with_it() -> None:
    cache = make_cache(LastTokens(3))
    fill(cache, TEXT[:8], [0, 2, 3, 4])
    pages, bounded = cache.evict(2)
    assert (pages.tolist(), bounded.tolist()) == ([12, 13], [3, 4])
    pages, bounded = cache.evict(5)
    assert (pages.tolist(), bounded.tolist()) == ([10, 11], [2])
    assert cache.num_evictable_bounded(0) == 0
    check(cache, [])


def test_what_has_left_the_tree_is_not_kept_for_eviction() -> None:
    cache = make_cache(LastTokens(3))
    for index in range(200):
        fill(cache, [index, *TEXT[:7]], [1, 2, 3, 4])
        cache.evict(4)
    assert len(cache._bounded[0]._heap) <= 2
    fill(cache, TEXT[:4], [1, 2])
    fill(cache, [7, 7, 7, 7], [3, 4], first_page=20)
    cache.evict(2)
    assert cache.evict_bounded(4, 0).tolist() == [3, 4]
    check(cache, [])


def test_wrong_use_is_an_error() -> None:
    cache = make_cache(LastTokens(3))
    node = fill(cache, TEXT[:8], [1, 2, 3, 4]).node
    cache.lock(node)
    cache.hold(node, 0)
    cache.unhold(node, 0)
    with pytest.raises(IntegrityError, match="let go more often"):
        cache.unhold(node, 0)
    with pytest.raises(IntegrityError, match="every account"):
        cache.insert(ints(TEXT[:2]), ints([9]), "", ())
    with pytest.raises(IntegrityError, match="every account"):
        cache.insert(ints(TEXT[:2]), ints([9]), "", (ints([1, 2]),))


@pytest.mark.parametrize("harm", ["hold", "page", "count", "offer"])
def test_a_broken_account_is_found(harm: str) -> None:
    cache = make_cache(LastTokens(3))
    node = fill(cache, TEXT[:8], [1, 2, 3, 4]).node
    check(cache, [])
    if harm == "hold":
        node.holds[0] += 1
    elif harm == "page":
        node.bounded_pages = (np.append(node.bounded_pages[0], np.int32(9)),)
    elif harm == "count":
        cache._bounded[0].num_evictable_pages += 1
    else:
        node.is_offered[0] = False
    with pytest.raises(IntegrityError):
        check(cache, [])
