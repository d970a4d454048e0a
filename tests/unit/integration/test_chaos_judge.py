"""What the chaos run lets pass and what it calls a broken promise."""

import random

import pytest

from tests.integration.chaos.applications import FAKE, Answers, Request, draw_request
from tests.integration.chaos.clients import End, Outcome, Protocol
from tests.integration.chaos.judge import HEAL_S, Judge
from tests.integration.chaos.kills import WEIGHTS, Kill, KillKind, plan_kills

REQUEST = Request(0, [10], 4)
TOKENS = [11, 12, 13, 14]


def outcome(end, tokens=(), code="", protocol=Protocol.HTTP_STREAM, ended_s=100.0):
    made = Outcome(FAKE, protocol, REQUEST, None, started_s=95.0, ended_s=ended_s)
    made.token_ids += tokens
    made.conclude(end, code)
    return made


def verdict(made, *kills):
    return Judge(Answers(), kills).broken_promise(made)


def engines(number, at_s=99.0, kind=KillKind.ENGINE, name=FAKE.name):
    return Kill(kind, at_s, "", num_engines={name: number})


def ingresses(number, at_s=99.0):
    return Kill(KillKind.INGRESS, at_s, "", num_ingresses={FAKE.name: number})


def test_a_whole_answer_is_always_right_and_any_other_token_never():
    assert verdict(outcome(End.WHOLE, TOKENS)) is None
    assert verdict(outcome(End.WHOLE, TOKENS[:3])) == "too few tokens"
    assert verdict(outcome(End.WHOLE, [*TOKENS, 15])) == "wrong tokens"
    assert verdict(outcome(End.LEFT, [11, 13])) == "wrong tokens"
    assert verdict(outcome(End.LEFT, [11])) is None


@pytest.mark.parametrize("end", [End.SILENT, End.HUNG, End.TWICE])
def test_no_kill_excuses_silence_hanging_or_two_ends(end):
    assert verdict(outcome(end, [11]), engines(3), ingresses(2)) is not None


def test_a_lost_replica_needs_a_lost_engine_while_the_request_ran():
    lost = outcome(End.ERROR, [11], "replica_lost")
    assert verdict(lost) is not None
    assert verdict(lost, engines(1)) is None
    assert verdict(lost, engines(1, at_s=101.0)) is not None
    assert verdict(lost, engines(1, at_s=60.0)) is not None
    assert verdict(lost, engines(1, name="another")) is not None


def test_without_output_one_lost_engine_is_no_excuse_because_of_the_retry():
    lost = outcome(End.ERROR, [], "replica_lost")
    assert verdict(lost, engines(1)) is not None
    assert verdict(lost, engines(1), engines(1)) is None


def test_unavailable_needs_all_engines_lost_not_long_ago():
    refused = outcome(End.ERROR, [], "unavailable")
    assert verdict(refused, engines(FAKE.num_replicas - 1)) is not None
    assert verdict(refused, engines(FAKE.num_replicas)) is None
    long_ago_s = 95.0 - HEAL_S - 20.0
    assert verdict(refused, engines(FAKE.num_replicas, at_s=long_ago_s)) is not None


@pytest.mark.parametrize("code", ["draining", "internal", "timeout", "overloaded"])
def test_other_errors_are_never_right(code):
    assert verdict(outcome(End.ERROR, [], code), engines(3), ingresses(2)) is not None


def test_a_connection_may_break_only_at_the_death_of_an_ingress():
    broken = outcome(End.CONNECTION, [11])
    assert verdict(broken) is not None
    assert verdict(broken, engines(3)) is not None
    assert verdict(broken, ingresses(1)) is None
    assert verdict(broken, ingresses(1, at_s=90.0)) is not None


def test_nobody_listens_only_while_every_ingress_is_dead():
    refused = outcome(End.REFUSED)
    assert verdict(refused, ingresses(1)) is not None
    assert verdict(refused, ingresses(1), ingresses(1, at_s=80.0)) is None


@pytest.mark.parametrize("end", [End.ERROR, End.CONNECTION, End.REFUSED])
@pytest.mark.parametrize("code", ["replica_lost", "unavailable"])
def test_the_loss_of_the_head_excuses_nothing(end, code):
    head = Kill(KillKind.HEAD, 99.0, "")
    assert verdict(outcome(end, [], code), head) is not None


def test_a_plan_has_every_kind_first_and_repeats_with_its_seed():
    kinds = tuple(WEIGHTS)
    plans = [plan_kills(random.Random(5), kinds, 5.0, 15.0) for _ in range(2)]
    steps = [[next(plan) for _ in range(40)] for plan in plans]
    assert steps[0] == steps[1]
    assert {kind for _, kind in steps[0][: len(kinds)]} == set(kinds)
    assert all(5.0 <= wait_s <= 15.0 for wait_s, _ in steps[0])


def test_what_a_fake_engine_must_answer_follows_from_the_prompt():
    request = draw_request(FAKE, random.Random(1))
    expected = Answers().expected(FAKE, request)
    assert len(expected) == request.max_tokens
    assert expected[0] == (request.prompt[-1] + 1) % 4096
