"""Which replica is chosen, and why."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.routing.policy import (
    MIN_MATCH_SHARE,
    SPILL_FACTOR,
    Candidate,
    RouterSettings,
    RoutingPolicy,
    RoutingReason,
    SessionHome,
    load_in_queued_tokens,
)

SETTINGS = RouterSettings(imbalance_tokens=1000, min_match_tokens=64)


def choose(*candidates, seed=0, num_prompt_tokens=200):
    return RoutingPolicy(SETTINGS, random.Random(seed)).choose(candidates, num_prompt_tokens)


def test_a_single_candidate_is_the_only_choice():
    assert choose(Candidate("a", 10**9, 0)) == ("a", RoutingReason.ONLY)


def test_the_longest_match_wins_among_equally_loaded():
    decision = choose(Candidate("a", 0, 64), Candidate("b", 0, 128), Candidate("c", 0, 0))
    assert decision == ("b", RoutingReason.PREFIX)


def test_of_equal_matches_the_lighter_wins():
    assert choose(Candidate("a", 500, 128), Candidate("b", 100, 128)).replica_id == "b"


def test_load_beats_a_match_that_saves_less_than_it_costs():
    allowed = 1000 + SPILL_FACTOR * 128
    decision = choose(Candidate("a", allowed + 1, 128), Candidate("b", 0, 0))
    assert decision == ("b", RoutingReason.LOAD)
    assert choose(Candidate("a", allowed, 128), Candidate("b", 0, 0)).replica_id == "a"


def test_a_match_below_the_threshold_counts_as_none():
    assert choose(Candidate("a", 100, 63), Candidate("b", 0, 0)) == ("b", RoutingReason.LOAD)


def test_a_match_of_a_small_part_of_the_prompt_binds_nobody():
    candidates = Candidate("a", 500, 128), Candidate("b", 0, 0)
    long_prompt = int(128 / MIN_MATCH_SHARE)
    assert choose(*candidates, num_prompt_tokens=long_prompt) == ("a", RoutingReason.PREFIX)
    assert choose(*candidates, num_prompt_tokens=long_prompt + 4) == ("b", RoutingReason.LOAD)


def test_a_match_that_binds_nobody_still_counts_as_work_saved():
    candidates = Candidate("a", 100, 128), Candidate("b", 0, 0)
    assert choose(*candidates, num_prompt_tokens=4096) == ("a", RoutingReason.LOAD)


def test_a_match_that_the_lightest_replica_has_too_does_not_bind():
    decision = choose(Candidate("a", 1100, 128), Candidate("b", 0, 128))
    assert decision.replica_id == "b"
    decision = choose(Candidate("a", 1000 + SPILL_FACTOR * 64 + 1, 192), Candidate("b", 0, 128))
    assert decision == ("b", RoutingReason.LOAD)


def test_without_a_match_the_lightest_of_all_wins():
    loads = {"a": 3, "b": 2, "c": 1, "d": 4}
    for seed in range(50):
        candidates = [Candidate(name, load, 0) for name, load in loads.items()]
        assert choose(*candidates, seed=seed).replica_id == "c"


def test_equal_loads_are_chosen_equally_often():
    policy = RoutingPolicy(SETTINGS, random.Random(1))
    candidates = [Candidate(name, 0, 0) for name in "abcd"]
    counts = Counter(policy.choose(candidates, 100).replica_id for _ in range(4000))
    assert all(800 < counts[name] < 1200 for name in "abcd")


def test_sequential_load_stays_balanced():
    policy = RoutingPolicy(SETTINGS, random.Random(1))
    loads = dict.fromkeys("abcdefgh", 0)
    for _ in range(2000):
        chosen = policy.choose([Candidate(name, load, 0) for name, load in loads.items()], 100)
        loads[chosen.replica_id] += 1
    assert max(loads.values()) - min(loads.values()) <= 1


def test_a_token_in_memory_weighs_less_than_one_to_compute():
    assert load_in_queued_tokens(1000, 0) == load_in_queued_tokens(0, 32_000) == 1000


@given(st.integers(0, 20_000), st.integers(0, 20_000), st.integers(1, 500), st.booleans())
def test_a_session_keeps_its_replica_until_the_load_rule_says_otherwise(
    home_load, other_load, num_prompt_tokens, is_known
):
    policy = RoutingPolicy(SETTINGS, random.Random(0))
    candidates = [Candidate("home", home_load, 0), Candidate("other", other_load, 0)]
    session = SessionHome("home", is_known=is_known)
    decision = policy.choose(candidates, num_prompt_tokens, session)
    allowed = SPILL_FACTOR * num_prompt_tokens + SETTINGS.session_imbalance_tokens
    if home_load - other_load <= allowed:
        assert decision == ("home", RoutingReason.SESSION)
    else:
        assert decision == ("other", RoutingReason.LOAD)


def test_a_known_home_beats_a_match_and_an_unknown_one_does_not():
    candidates = [Candidate("home", 0, 0), Candidate("match", 0, 128)]
    policy = RoutingPolicy(SETTINGS, random.Random(0))
    known = policy.choose(candidates, 200, SessionHome("home", is_known=True))
    unknown = policy.choose(candidates, 200, SessionHome("home", is_known=False))
    assert known == ("home", RoutingReason.SESSION)
    assert unknown == ("match", RoutingReason.PREFIX)


@pytest.mark.parametrize("header", ["authorization", "X-Session", "x-session\n", "x-", "x_session"])
def test_a_session_header_is_a_lower_case_name_of_its_own(header):
    with pytest.raises(ValueError, match="session_header"):
        RouterSettings(session_header=header)


candidate = st.builds(Candidate, st.uuids().map(str), st.integers(0, 10**6), st.integers(0, 10**5))


@given(st.lists(candidate, min_size=1, max_size=8, unique_by=lambda c: c.replica_id))
def test_the_choice_is_never_overloaded_beyond_what_its_match_saves(candidates):
    decision = RoutingPolicy(SETTINGS, random.Random(0)).choose(candidates, 1000)
    chosen = next(c for c in candidates if c.replica_id == decision.replica_id)
    least = min(c.load_tokens for c in candidates)
    if decision.reason is RoutingReason.PREFIX:
        allowed = SPILL_FACTOR * chosen.matched_tokens + SETTINGS.imbalance_tokens
        assert chosen.load_tokens - least <= allowed + chosen.matched_tokens
    elif decision.reason is RoutingReason.LOAD:
        assert chosen.load_tokens - least <= chosen.matched_tokens


@pytest.mark.parametrize("field", ["unknown", "imbalance"])
def test_unknown_settings_are_errors(field):
    with pytest.raises(ValueError, match="Extra inputs"):
        RouterSettings.model_validate({field: 1})
