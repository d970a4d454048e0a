"""RadixCache: whole pages by content, locked while used, evicted by last use."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.workers.kv_cache.caches import insert, ints, make_cache, match
from workers.errors import IntegrityError
from workers.kv_cache import eviction_order
from workers.kv_cache.eviction_order import LIFETIME_RATIO
from workers.kv_cache.prefix_cache import NoPrefixCache
from workers.kv_cache.radix_node import RadixNode


def test_an_empty_cache_matches_nothing():
    assert len(match(make_cache(), [1, 2, 3]).pages) == 0


def test_what_was_inserted_is_found():
    cache = make_cache()
    insert(cache, [1, 2, 3, 4], [7, 8])
    assert match(cache, [1, 2, 3, 4, 5]).pages.tolist() == [7, 8]
    assert cache.num_evictable_pages == 2


@pytest.mark.parametrize(
    ("tokens", "pages"),
    [([1, 2, 3], [7]), ([1, 2, 3, 9, 5, 6], [7]), ([1, 9, 3, 4], []), ([1], []), ([], [])],
)
def test_only_whole_agreeing_pages_match(tokens: list[int], pages: list[int]):
    cache = make_cache()
    insert(cache, [1, 2, 3, 4], [7, 8])
    assert match(cache, tokens).pages.tolist() == pages
    cache.check_integrity([])


def test_branches_share_their_common_pages():
    cache = make_cache()
    insert(cache, [1, 2, 3, 4], [7, 8])
    result = insert(cache, [1, 2, 5, 6], [9, 10])
    assert result.pages.tolist() == [7, 10], "page 9 is a duplicate of 7, page 10 is new"
    assert match(cache, [1, 2, 3, 4]).pages.tolist() == [7, 8]
    assert match(cache, [1, 2, 5, 6]).pages.tolist() == [7, 10]
    assert sorted(cache.all_pages().tolist()) == [7, 8, 10]
    cache.check_integrity([])


def test_inserting_again_takes_nothing():
    cache = make_cache()
    insert(cache, [1, 2, 3, 4], [7, 8])
    assert insert(cache, [1, 2, 3, 4], [9, 10]).pages.tolist() == [7, 8]
    assert cache.num_evictable_pages == 2


def test_inserting_does_not_keep_the_callers_arrays():
    cache = make_cache()
    tokens, pages = ints([1, 2]), ints([7])
    cache.insert(tokens, pages, "")
    tokens[0] = pages[0] = 99
    assert match(cache, [1, 2]).pages.tolist() == [7]


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(IntegrityError, match="cannot hold"):
        insert(make_cache(), [1, 2, 3], [7])


def test_salts_do_not_see_each_other():
    cache = make_cache()
    insert(cache, [1, 2], [7], salt="a")
    assert len(match(cache, [1, 2], salt="b").pages) == 0
    assert len(match(cache, [1, 2]).pages) == 0
    assert match(cache, [1, 2], salt="a").pages.tolist() == [7]


def test_a_salt_without_pages_is_forgotten():
    cache = make_cache()
    insert(cache, [1, 2], [7], salt="a")
    insert(cache, [], [], salt="b")
    assert list(cache._roots) == ["a"]
    cache.evict(1)
    assert not cache._roots
    cache.check_integrity([])


def test_the_least_recently_used_leaf_goes_first():
    cache = make_cache()
    insert(cache, [1, 2], [7])
    insert(cache, [3, 4], [8])
    insert(cache, [5, 6], [9])
    match(cache, [1, 2])
    assert cache.evict(1)[0].tolist() == [8]
    assert cache.evict(2)[0].tolist() == [9, 7]
    assert len(cache.evict(1)[0]) == 0


def test_a_parent_goes_after_its_children():
    cache = make_cache()
    insert(cache, [1, 2, 3, 4], [7, 8])
    insert(cache, [1, 2, 5, 6], [7, 9])
    assert cache.evict(3)[0].tolist() == [8, 9, 7]
    cache.check_integrity([])


def test_a_long_leaf_loses_only_its_tail():
    cache = make_cache()
    insert(cache, list(range(10)), [1, 2, 3, 4, 5])
    assert sorted(cache.evict(2)[0].tolist()) == [4, 5]
    assert match(cache, list(range(10))).pages.tolist() == [1, 2, 3]
    assert cache.num_evictable_pages == 3
    cache.check_integrity([])


def test_locked_pages_are_not_evicted_until_unlocked_as_often():
    cache = make_cache()
    insert(cache, [1, 2, 3, 4], [7, 8])
    node = match(cache, [1, 2]).node
    cache.lock(node)
    cache.lock(node)
    assert cache.num_evictable_pages == 1
    assert cache.evict(5)[0].tolist() == [8]
    cache.unlock(node)
    assert len(cache.evict(5)[0]) == 0
    cache.check_integrity([node])
    cache.unlock(node)
    assert cache.evict(5)[0].tolist() == [7]
    assert cache.num_evictable_pages == 0


def test_a_lock_survives_a_split_of_its_edge():
    cache = make_cache()
    node = insert(cache, [1, 2, 3, 4], [7, 8]).node
    cache.lock(node)
    insert(cache, [1, 2, 9, 9], [7, 9])
    assert node.path_pages().tolist() == [7, 8]
    assert cache.evict(5)[0].tolist() == [9]
    cache.check_integrity([node])
    cache.unlock(node)
    assert cache.num_evictable_pages == 2


def test_locking_the_match_of_nothing_keeps_nothing():
    cache = make_cache()
    node = match(cache, [1, 2]).node
    cache.lock(node)
    insert(cache, [1, 2], [7])
    assert cache.evict(1)[0].tolist() == [7]
    cache.unlock(node)
    cache.check_integrity([node])


def test_unlocking_too_often_is_detected():
    cache = make_cache()
    node = insert(cache, [1, 2], [7]).node
    with pytest.raises(IntegrityError, match="unlocked more often"):
        cache.unlock(node)


def test_a_lock_without_a_holder_is_detected():
    cache = make_cache()
    node = insert(cache, [1, 2], [7]).node
    cache.lock(node)
    with pytest.raises(IntegrityError, match="locked 1 times by 0 users"):
        cache.check_integrity([])


def test_a_holder_of_an_evicted_node_is_detected():
    cache = make_cache()
    node = insert(cache, [1, 2, 3, 4], [7, 8]).node
    with pytest.raises(IntegrityError, match="locked 0 times by 1 users"):
        cache.check_integrity([node])


def test_the_disabled_cache_takes_and_finds_nothing():
    cache = NoPrefixCache()
    result = cache.insert(ints([1, 2]), ints([7]), "")
    cache.lock(result.node)
    cache.unlock(result.node)
    assert len(result.pages) == 0
    assert len(cache.match_prefix(ints([1, 2]), "").pages) == 0
    assert cache.num_evictable_pages == 0
    assert len(cache.evict(3)[0]) == len(cache.all_pages()) == 0
    cache.check_integrity([result.node])
    with pytest.raises(IntegrityError, match="a cache that keeps none"):
        cache.check_integrity([RadixNode.root("")])


class Model:
    """The cache by definition: a dict from (salt, tokens of whole pages) to the last page."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.page_of: dict[tuple[str, tuple[int, ...]], int] = {}

    def prefixes(self, tokens: list[int]) -> list[tuple[int, ...]]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [tuple(tokens[:end]) for end in ends]

    def match(self, tokens: list[int], salt: str) -> list[int]:
        keys = [(salt, prefix) for prefix in self.prefixes(tokens)]
        return [self.page_of[key] for key in itertools.takewhile(self.page_of.__contains__, keys)]


sequences = st.lists(st.integers(0, 1), max_size=9)
operations = st.one_of(
    st.tuples(st.just("insert"), sequences, st.sampled_from(["", "s"])),
    st.tuples(st.just("match"), sequences, st.sampled_from(["", "s"])),
    st.tuples(st.just("lock"), sequences, st.sampled_from(["", "s"])),
    st.tuples(st.just("unlock"), st.integers(0, 9), st.just("")),
    st.tuples(st.just("evict"), st.integers(0, 5), st.just("")),
)


@pytest.mark.parametrize("ratio", [0, 1, LIFETIME_RATIO])
def test_any_history_agrees_with_a_dict_of_prefixes(
    ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eviction_order, "LIFETIME_RATIO", ratio)
    check_any_history()


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 3), st.lists(operations, max_size=60))
def check_any_history(page_size: int, history: list) -> None:
    cache, model = make_cache(page_size), Model(page_size)
    pages = itertools.count(1)
    locked: list[tuple[RadixNode, list[int]]] = []
    for kind, argument, salt in history:
        if kind == "insert":
            tokens = argument[: len(argument) // page_size * page_size]
            mine = [next(pages) for _ in range(len(tokens) // page_size)]
            result = insert(cache, tokens, mine, salt)
            for prefix, page in zip(model.prefixes(tokens), mine, strict=True):
                model.page_of.setdefault((salt, prefix), page)
            assert result.pages.tolist() == model.match(tokens, salt)
            assert result.node.path_pages().tolist() == result.pages.tolist()
        elif kind in ("match", "lock"):
            found = match(cache, argument, salt)
            assert found.pages.tolist() == model.match(argument, salt)
            if kind == "lock":
                cache.lock(found.node)
                locked.append((found.node, found.pages.tolist()))
        elif kind == "unlock" and locked:
            cache.unlock(locked.pop(argument % len(locked))[0])
        elif kind == "evict":
            evictable = cache.num_evictable_pages
            gone = set(cache.evict(argument)[0].tolist())
            assert len(gone) == min(argument, evictable)
            assert not gone & {page for _, held in locked for page in held}
            model.page_of = {k: page for k, page in model.page_of.items() if page not in gone}
        assert sorted(cache.all_pages().tolist()) == sorted(model.page_of.values())
        in_use = {page for _, held in locked for page in held}
        assert cache.num_evictable_pages == len(model.page_of) - len(in_use)
        for node, held in locked:
            assert node.path_pages().tolist() == held
        cache.check_integrity([node for node, _ in locked])


def test_nothing_inserted_is_held_by_the_root_of_its_own_salt():
    cache = make_cache()
    insert(cache, [1, 2], [7], "a")
    nothing = insert(cache, [], [], "a")
    assert (nothing.node.salt, len(nothing.node.children)) == ("a", 1)
    assert insert(cache, [], [], "b").node.children == {}
    assert len(nothing.pages) == 0
