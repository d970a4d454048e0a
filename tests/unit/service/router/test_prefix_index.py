"""The prefix index: exact on what it remembers, bounded, salted."""

import random

from hypothesis import given
from hypothesis import strategies as st

from service.prefix_index import PrefixIndex


def index(block_tokens=4, max_blocks=1000, max_match_tokens=400):
    return PrefixIndex(block_tokens, max_blocks, max_match_tokens)


def test_the_longest_shared_prefix_is_matched_in_whole_blocks():
    prefixes = index()
    prefixes.insert(prefixes.keys(list(range(20)), ""), "a")
    prefixes.insert(prefixes.keys([*range(8), *range(100, 112)], ""), "b")
    matched = prefixes.match(prefixes.keys([*range(14), 7, 7, 7], ""), ["a", "b", "c"])
    assert matched == {"a": 12, "b": 8}


def test_different_salts_share_nothing():
    prefixes = index()
    prefixes.insert(prefixes.keys(list(range(20)), "tenant-1"), "a")
    assert prefixes.match(prefixes.keys(list(range(20)), "tenant-2"), ["a"]) == {}
    assert prefixes.match(prefixes.keys(list(range(20)), "tenant-1"), ["a"]) == {"a": 20}


def test_equal_blocks_after_different_beginnings_do_not_match():
    prefixes = index()
    prefixes.insert(prefixes.keys([1, 1, 1, 1, 5, 5, 5, 5], ""), "a")
    assert prefixes.match(prefixes.keys([2, 2, 2, 2, 5, 5, 5, 5], ""), ["a"]) == {}


def test_prompts_shorter_than_a_block_have_no_keys():
    assert index().keys([1, 2, 3], "") == []


def test_only_the_first_tokens_of_a_long_prompt_are_looked_at():
    assert len(index(max_match_tokens=40).keys(list(range(1000)), "")) == 10


def test_a_forgotten_replica_matches_nothing_and_takes_no_room():
    prefixes = index()
    prefixes.insert(prefixes.keys(list(range(20)), ""), "a")
    prefixes.insert(prefixes.keys(list(range(8)), ""), "b")
    prefixes.forget("a")
    assert prefixes.match(prefixes.keys(list(range(20)), ""), ["a", "b"]) == {"b": 8}
    assert len(prefixes) == 2


def test_eviction_takes_leaves_before_ancestors_and_old_before_new():
    prefixes = index(max_blocks=6)
    prefixes.insert(prefixes.keys(list(range(16)), ""), "a")
    prefixes.insert(prefixes.keys(list(range(100, 116)), ""), "a")
    assert len(prefixes) == 6
    assert prefixes.match(prefixes.keys(list(range(100, 116)), ""), ["a"]) == {"a": 16}
    assert prefixes.match(prefixes.keys(list(range(16)), ""), ["a"]) == {"a": 8}


prompt = st.lists(st.integers(0, 2), max_size=24)


@given(st.lists(st.tuples(prompt, st.sampled_from("abc")), max_size=20), prompt)
def test_matches_equal_those_of_a_plain_list_of_prompts(history, query):
    prefixes = index(block_tokens=3, max_blocks=10_000)
    for tokens, replica_id in history:
        prefixes.insert(prefixes.keys(tokens, ""), replica_id)
    expected = {}
    for tokens, replica_id in history:
        num_common = 0
        while num_common < min(len(tokens), len(query)) and tokens[num_common] == query[num_common]:
            num_common += 1
        blocks = num_common // 3 * 3
        if blocks:
            expected[replica_id] = max(expected.get(replica_id, 0), blocks)
    assert prefixes.match(prefixes.keys(query, ""), "abc") == expected


def test_the_index_never_exceeds_its_bound():
    rng = random.Random(0)
    prefixes = index(max_blocks=50)
    for _ in range(200):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(60))]
        prefixes.insert(prefixes.keys(tokens, ""), "a")
        assert len(prefixes) <= 50
