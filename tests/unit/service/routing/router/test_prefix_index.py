"""The prefix index: exact on what it remembers, bounded, salted."""

import math
import random

from hypothesis import given
from hypothesis import strategies as st

from service.routing.prefix_index import Evicted, PrefixIndex
from workers.engine.content import ContentSpan

HELD = dict.fromkeys("abc", Evicted(-1, -1))
"""Nothing is evicted."""


def at(ordinary, b=None, shared=-math.inf):
    """What replica "a" has evicted, and "b" where it is named."""
    evicted = {"a": Evicted(ordinary, shared)}
    return evicted if b is None else {**evicted, "b": Evicted(b, shared)}


def index(block_tokens=4, max_blocks=1000, max_match_tokens=400):
    return PrefixIndex(block_tokens, max_blocks, max_match_tokens)


def test_the_longest_shared_prefix_is_matched_in_whole_blocks():
    prefixes = index()
    prefixes.insert(prefixes.keys(list(range(20)), ""), "a", 0)
    prefixes.insert(prefixes.keys([*range(8), *range(100, 112)], ""), "b", 0)
    matched = prefixes.match(prefixes.keys([*range(14), 7, 7, 7], ""), HELD)
    assert matched == {"a": 12, "b": 8}


def test_different_salts_share_nothing():
    prefixes = index()
    prefixes.insert(prefixes.keys(list(range(20)), "tenant-1"), "a", 0)
    assert prefixes.match(prefixes.keys(list(range(20)), "tenant-2"), HELD) == {}
    assert prefixes.match(prefixes.keys(list(range(20)), "tenant-1"), HELD) == {"a": 20}


def test_prompts_are_equal_up_to_the_block_where_unlike_content_begins():
    prefixes, tokens = index(), list(range(20))
    cat, dog, longer = (
        prefixes.keys(tokens, "", [ContentSpan(2, 1, b"m" * 16), ContentSpan(9, length, digest)])
        for length, digest in ((3, b"c" * 16), (3, b"d" * 16), (4, b"c" * 16))
    )
    for other in (dog, longer):
        assert [a == b for a, b in zip(cat, other, strict=True)] == [True, True, *[False] * 3]
    assert not set(cat) & set(prefixes.keys(tokens, ""))
    again = [ContentSpan(2, 1, b"m" * 16), ContentSpan(9, 3, b"c" * 16)]
    assert prefixes.keys(tokens, "", again) == cat


def test_equal_blocks_after_different_beginnings_do_not_match():
    prefixes = index()
    prefixes.insert(prefixes.keys([1, 1, 1, 1, 5, 5, 5, 5], ""), "a", 0)
    assert prefixes.match(prefixes.keys([2, 2, 2, 2, 5, 5, 5, 5], ""), HELD) == {}


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(0, 40))
def test_keys_are_equal_exactly_as_far_as_prompts_are(tokens, num_kept):
    prefixes = index()
    other = [*tokens[:num_kept], *((t + 1) % 2**31 for t in tokens[num_kept:])]
    pairs = list(zip(prefixes.keys(tokens, "s"), prefixes.keys(other, "s"), strict=True))
    num_equal = min(num_kept, len(tokens)) // 4
    assert [a == b for a, b in pairs] == [i < num_equal for i in range(len(pairs))]


def test_prompts_shorter_than_a_block_have_no_keys():
    assert index().keys([1, 2, 3], "") == []


def test_only_the_first_tokens_of_a_long_prompt_are_looked_at():
    assert len(index(max_match_tokens=40).keys(list(range(1000)), "")) == 10


def test_a_forgotten_replica_matches_nothing_and_takes_no_room():
    prefixes = index()
    prefixes.insert(prefixes.keys(list(range(20)), ""), "a", 0)
    prefixes.insert(prefixes.keys(list(range(8)), ""), "b", 0)
    prefixes.forget("a")
    assert prefixes.match(prefixes.keys(list(range(20)), ""), HELD) == {"b": 8}
    assert len(prefixes) == 2


def test_what_was_last_used_no_later_than_what_a_replica_evicted_does_not_match():
    prefixes = index()
    keys = prefixes.keys(list(range(20)), "")
    use = prefixes.insert(keys, "a", 0)
    assert prefixes.match(keys, at(1e9)) == {"a": 20}  # in use
    use.released_at = 1000
    assert prefixes.match(keys, at(999, b=0)) == {"a": 20}
    assert prefixes.match(keys, at(1000, b=0)) == {}


def test_a_later_use_keeps_the_part_that_it_shares():
    prefixes = index()
    first, second = (prefixes.keys([*range(8), n, n, n, n], "") for n in (100, 200))
    prefixes.insert(first, "a", 0).released_at = 10
    prefixes.insert(second, "a", 0).released_at = 20
    assert prefixes.match(first, at(15)) == {"a": 8}
    assert prefixes.match(second, at(15)) == {"a": 12}


def shared_at_a(prefixes):
    """Two requests that go on differently from the same 8 tokens, the later one released at 12."""
    first, second = (prefixes.keys([*range(8), n, n, n, n], "") for n in (100, 200))
    prefixes.insert(first, "a", 0).released_at = 10
    prefixes.insert(second, "a", 8).released_at = 12
    return first


def test_what_requests_share_is_evicted_by_another_horizon_than_what_one_alone_used():
    prefixes = index()
    first = prefixes.keys([*range(8), 100, 100, 100, 100], "")
    prefixes.insert(first, "a", 0).released_at = 10
    assert prefixes.match(first, at(15, shared=5)) == {}, "one alone went on from it"
    prefixes.insert(first, "a", 12).released_at = 10
    assert prefixes.match(first, at(15, shared=5)) == {}, "in one way only"
    shared_at_a(prefixes)
    assert prefixes.match(first, at(15, shared=5)) == {"a": 8}
    assert prefixes.match(first, at(15, shared=12)) == {}


def test_what_is_shared_at_one_replica_is_not_shared_at_another():
    prefixes = index()
    first = shared_at_a(prefixes)
    prefixes.insert(first, "b", 0).released_at = 10
    matched = prefixes.match(first, {"a": Evicted(11, 5), "b": Evicted(11, 5)})
    assert matched == {"a": 8}


def test_what_is_written_again_after_its_eviction_is_not_shared_any_more():
    prefixes = index()
    first = shared_at_a(prefixes)
    prefixes.insert(first, "a", 0).released_at = 20
    assert prefixes.match(first, at(25, shared=15)) == {}
    prefixes.insert(prefixes.keys([*range(8), 7, 7, 7, 7], ""), "a", 8).released_at = 20
    assert prefixes.match(first, at(25, shared=15)) == {"a": 8}


def test_eviction_takes_leaves_before_ancestors_and_old_before_new():
    prefixes = index(max_blocks=6)
    prefixes.insert(prefixes.keys(list(range(16)), ""), "a", 0)
    prefixes.insert(prefixes.keys(list(range(100, 116)), ""), "a", 0)
    assert len(prefixes) == 6
    assert prefixes.match(prefixes.keys(list(range(100, 116)), ""), HELD) == {"a": 16}
    assert prefixes.match(prefixes.keys(list(range(16)), ""), HELD) == {"a": 8}


prompt = st.lists(st.integers(0, 2), max_size=24)


@given(st.lists(st.tuples(prompt, st.sampled_from("abc")), max_size=20), prompt)
def test_matches_equal_those_of_a_plain_list_of_prompts(history, query):
    prefixes = index(block_tokens=3, max_blocks=10_000)
    for tokens, replica_id in history:
        prefixes.insert(prefixes.keys(tokens, ""), replica_id, 0)
    expected = {}
    for tokens, replica_id in history:
        num_common = 0
        while num_common < min(len(tokens), len(query)) and tokens[num_common] == query[num_common]:
            num_common += 1
        blocks = num_common // 3 * 3
        if blocks:
            expected[replica_id] = max(expected.get(replica_id, 0), blocks)
    assert prefixes.match(prefixes.keys(query, ""), HELD) == expected


def test_the_index_never_exceeds_its_bound():
    rng = random.Random(0)
    prefixes = index(max_blocks=50)
    for _ in range(200):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(60))]
        prefixes.insert(prefixes.keys(tokens, ""), "a", 0)
        assert len(prefixes) <= 50
