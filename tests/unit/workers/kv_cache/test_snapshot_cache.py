"""Snapshots in the radix tree: where a path can be continued, and what becomes of them."""

import itertools
import random

import numpy as np
import pytest

from attention.memory.layout import LastTokens
from tests.unit.workers.kv_cache.caches import insert, ints, match
from workers.errors import IntegrityError
from workers.kv_cache.radix_node import NO_SNAPSHOT
from workers.kv_cache.snapshot_cache import SnapshotRadixCache

TOKENS = list(range(10, 22))
PAGES = [1, 2, 3, 4, 5, 6]


def make_cache(num_snapshots: int = 3, retentions=()) -> SnapshotRadixCache:
    return SnapshotRadixCache(2, itertools.count(1).__next__, num_snapshots, retentions)


def attach(cache: SnapshotRadixCache, tokens: list[int], pages: list[int], num_pages: int) -> int:
    """Inserts all pages; the snapshot behind the first num_pages of them."""
    snapshot = cache.take_snapshot()
    assert snapshot is not None
    cache.attach_snapshot(insert(cache, tokens, pages).node, num_pages, snapshot)
    cache.check_snapshots(())
    return snapshot


def found(cache: SnapshotRadixCache, tokens: list[int]) -> tuple[int, int, int]:
    """Pages and snapshot that one can go on with, and the pages that are known."""
    result = match(cache, tokens)
    assert np.array_equal(result.pages, result.node.path_pages())
    cache.check_snapshots(())
    cache.check_integrity(())
    return len(result.pages), result.snapshot, result.num_known_pages


def test_a_path_without_a_snapshot_is_known_and_not_matched() -> None:
    cache = make_cache()
    insert(cache, TOKENS, PAGES)
    assert found(cache, TOKENS) == (0, NO_SNAPSHOT, 6)
    assert found(cache, [1, 2, 3]) == (0, NO_SNAPSHOT, 0)


def test_a_match_ends_at_the_deepest_snapshot() -> None:
    cache = make_cache()
    early = attach(cache, TOKENS, PAGES, 2)
    late = attach(cache, TOKENS, PAGES, 5)
    assert found(cache, TOKENS) == (5, late, 6)
    assert found(cache, TOKENS[:9]) == (2, early, 4)
    assert found(cache, [*TOKENS[:5], 99]) == (2, early, 2)
    assert found(cache, TOKENS[:3]) == (0, NO_SNAPSHOT, 1)


def test_a_node_that_is_split_keeps_its_snapshot_at_its_end() -> None:
    cache = make_cache()
    snapshot = attach(cache, TOKENS, PAGES, 6)
    insert(cache, [*TOKENS[:4], 90, 91], [1, 2, 9])
    assert found(cache, TOKENS) == (6, snapshot, 6)
    assert found(cache, [*TOKENS[:4], 90, 91]) == (0, NO_SNAPSHOT, 3)


def test_a_second_snapshot_of_a_place_is_given_back() -> None:
    cache = make_cache(2)
    first = attach(cache, TOKENS, PAGES, 3)
    attach(cache, TOKENS, PAGES, 3)
    assert found(cache, TOKENS)[:2] == (3, first)
    assert cache.take_snapshot() not in (None, first)


def test_the_least_recently_used_is_evicted_and_its_pages_stay() -> None:
    cache = make_cache(2)
    first = attach(cache, TOKENS, PAGES, 2)
    attach(cache, TOKENS, PAGES, 4)
    assert cache.eviction_horizon == (-1, -1)
    assert found(cache, TOKENS[:6])[0] == 2  # used
    third = attach(cache, [50, 51], [7], 1)
    assert found(cache, TOKENS) == (2, first, 6)
    assert found(cache, [50, 51]) == (1, third, 1)
    horizon = cache.eviction_horizon
    assert horizon.ordinary == horizon.shared > 0


def test_none_can_be_had_while_requests_have_all() -> None:
    cache = make_cache(2)
    taken = [cache.take_snapshot(), cache.take_snapshot()]
    assert cache.take_snapshot() is None
    cache.check_snapshots(taken)
    with pytest.raises(IntegrityError, match=r"snapshots \[1\] have \[0\] owners"):
        cache.check_snapshots([0])
    cache.give_snapshot_back(1)
    with pytest.raises(IntegrityError, match=r"snapshots \[1\] have \[2\] owners"):
        cache.check_snapshots([0, 1])
    assert cache.take_snapshot() == 1


def test_the_end_of_a_leaf_takes_its_snapshot_along() -> None:
    cache = make_cache(1)
    snapshot = attach(cache, TOKENS, PAGES, 6)
    assert len(cache.evict(1)[0]) == 1
    assert found(cache, TOKENS) == (0, NO_SNAPSHOT, 5)
    assert cache.take_snapshot() == snapshot


def test_every_account_must_be_able_to_resume() -> None:
    """A window of 4 tokens sees two pages before a border."""
    cache = make_cache(retentions=[LastTokens(4)])
    node = cache.insert(ints(TOKENS), ints(PAGES), "", (ints([0, 0, 13, 14, 0, 16]),)).node
    for num_pages in (3, 4, 6):
        snapshot = cache.take_snapshot()
        assert snapshot is not None
        cache.attach_snapshot(node, num_pages, snapshot)
    result = match(cache, TOKENS)
    assert (len(result.pages), result.snapshot, result.num_known_pages) == (4, 1, 6)


def test_storm_of_inserts_evictions_and_snapshots() -> None:
    """Each snapshot tells of what it was taken, and is never found behind anything else."""
    rng, cache, told = random.Random(3), make_cache(9), {}
    taken: list[int] = []
    next_page = itertools.count(1)
    num_hits = 0
    for _ in range(800):
        tokens = [rng.randrange(3) for _ in range(2 * rng.randrange(1, 9))]
        action = rng.random()
        if action < 0.4:
            pages = [next(next_page) for _ in range(len(tokens) // 2)]
            node = insert(cache, tokens, pages).node
            snapshot = taken.pop() if taken and rng.random() < 0.5 else cache.take_snapshot()
            if snapshot is not None:
                num_pages = rng.randrange(1, 1 + len(pages))
                cache.attach_snapshot(node, num_pages, snapshot)
                if match(cache, tokens[: 2 * num_pages]).snapshot == snapshot:
                    told[snapshot] = tokens[: 2 * num_pages]
        elif action < 0.7:
            result = match(cache, tokens)
            if result.snapshot != NO_SNAPSHOT:
                num_hits += 1
                assert told[result.snapshot] == tokens[: 2 * len(result.pages)]
        elif action < 0.8:
            cache.evict(rng.randrange(6))
        elif taken and action < 0.9:
            cache.give_snapshot_back(taken.pop())
        elif len(taken) < 8:
            snapshot = cache.take_snapshot()
            assert snapshot is not None
            taken.append(snapshot)
        cache.check_snapshots(taken)
        cache.check_integrity(())
    assert num_hits > 40
