"""Which replica is chosen, and why."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.routing_policy import Candidate, RouterSettings, RoutingPolicy, RoutingReason

SETTINGS = RouterSettings(imbalance_tokens=1000, min_match_tokens=64)


def choose(*candidates, seed=0):
    return RoutingPolicy(SETTINGS, random.Random(seed)).choose(candidates)


def test_a_single_candidate_is_the_only_choice():
    assert choose(Candidate("a", 10**9, 0)) == ("a", RoutingReason.ONLY)


def test_the_longest_match_wins_among_equally_loaded():
    decision = choose(Candidate("a", 0, 64), Candidate("b", 0, 128), Candidate("c", 0, 0))
    assert decision == ("b", RoutingReason.PREFIX)


def test_of_equal_matches_the_lighter_wins():
    assert choose(Candidate("a", 500, 128), Candidate("b", 100, 128)).replica_id == "b"


def test_load_beats_a_match_that_saves_less_than_it_costs():
    decision = choose(Candidate("a", 1200, 128), Candidate("b", 0, 0))
    assert decision == ("b", RoutingReason.LOAD)
    assert choose(Candidate("a", 1100, 128), Candidate("b", 0, 0)).replica_id == "a"


def test_a_match_below_the_threshold_counts_as_none():
    assert choose(Candidate("a", 10, 63), Candidate("b", 0, 0)) == ("b", RoutingReason.LOAD)


def test_without_a_match_the_heavier_of_two_never_wins():
    for seed in range(50):
        assert choose(Candidate("a", 1, 0), Candidate("b", 2, 0), seed=seed).replica_id == "a"


def test_two_choices_spread_equal_loads():
    policy = RoutingPolicy(SETTINGS, random.Random(1))
    candidates = [Candidate(name, 0, 0) for name in "abcd"]
    counts = Counter(policy.choose(candidates).replica_id for _ in range(4000))
    assert all(800 < counts[name] < 1200 for name in "abcd")


def test_two_choices_keep_sequential_load_balanced():
    policy = RoutingPolicy(SETTINGS, random.Random(1))
    loads = dict.fromkeys("abcdefgh", 0)
    for _ in range(2000):
        chosen = policy.choose([Candidate(name, load, 0) for name, load in loads.items()])
        loads[chosen.replica_id] += 1
    assert max(loads.values()) - min(loads.values()) < 10


candidate = st.builds(Candidate, st.uuids().map(str), st.integers(0, 10**6), st.integers(0, 10**5))


@given(st.lists(candidate, min_size=1, max_size=8, unique_by=lambda c: c.replica_id))
def test_the_choice_is_never_overloaded_beyond_what_its_match_saves(candidates):
    decision = RoutingPolicy(SETTINGS, random.Random(0)).choose(candidates)
    chosen = next(c for c in candidates if c.replica_id == decision.replica_id)
    least = min(c.load_tokens for c in candidates)
    if decision.reason is RoutingReason.PREFIX:
        assert chosen.load_tokens - least <= chosen.matched_tokens + SETTINGS.imbalance_tokens
    elif decision.reason is RoutingReason.LOAD:
        assert sum(c.load_tokens >= chosen.load_tokens for c in candidates) >= 2


@pytest.mark.parametrize("field", ["unknown", "imbalance"])
def test_unknown_settings_are_errors(field):
    with pytest.raises(ValueError, match="Extra inputs"):
        RouterSettings.model_validate({field: 1})
