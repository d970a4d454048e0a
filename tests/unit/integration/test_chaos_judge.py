"""What the chaos run lets pass and what it calls a broken promise."""

import random
import time

import pytest

from tests.integration.chaos.applications import (
    FAKE,
    NUM_PROMPTS,
    REAL,
    Answer,
    Answers,
    Request,
    draw_request,
    recorded_request,
)
from tests.integration.chaos.clients import End, Outcome, Protocol
from tests.integration.chaos.judge import HEAL_S, Judge
from tests.integration.chaos.kills import WEIGHTS, Kill, KillKind, plan_kills
from tests.integration.chaos.spares import Spares

REQUEST = Request(0, [10], 4)
TOKENS = [11, 12, 13, 14]


def outcome(end, tokens=(), code="", protocol=Protocol.HTTP_STREAM, ended_s=100.0):
    made = Outcome(FAKE, protocol, REQUEST, None, started_s=95.0, ended_s=ended_s)
    made.token_ids += tokens
    made.conclude(end, code)
    return made


def verdict(made, *kills, keeps_spares=False):
    return Judge(Answers(), kills, keeps_spares=keeps_spares).broken_promise(made)


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


@pytest.mark.parametrize("code", ["replica_lost", "unavailable"])
@pytest.mark.parametrize("received", [[], [11]])
def test_while_another_replica_lives_no_number_of_lost_engines_is_an_excuse(code, received):
    lost = outcome(End.ERROR, received, code)
    kills = [engines(1) for _ in range(5)]
    assert verdict(lost, *kills, keeps_spares=True) == f"{code} while another replica lives"


@pytest.mark.parametrize("code", ["replica_lost", "unavailable"])
def test_a_lost_stream_needs_all_engines_lost_not_long_ago(code):
    refused = outcome(End.ERROR, [], code)
    assert verdict(refused, engines(FAKE.num_replicas, at_s=101.0)) is not None
    assert verdict(refused, engines(FAKE.num_replicas, name="another")) is not None
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


def test_recorded_answers_are_compared_with_their_text():
    request = recorded_request(REAL, 1)
    assert recorded_request(REAL, 1) == request
    answers = Answers()
    answers.record(1, Answer([4, 5, 6], "abc"))

    def judged(token_ids, text):
        made = Outcome(REAL, Protocol.GRPC_STREAM, request, None)
        made.token_ids += token_ids
        made.text = text
        made.conclude(End.WHOLE)
        return Judge(answers, [], keeps_spares=True).broken_promise(made)

    assert judged([4, 5, 6], "abc") is None
    assert judged([4, 5, 6], "ab") == "wrong text"
    assert judged([4, 5], "ab") == "too few tokens"
    assert judged([4, 5, 7], "abc") == "wrong tokens"


def test_requests_to_the_real_engine_are_greedy_seeded_and_penalised():
    samplings = [recorded_request(REAL, index).sampling for index in range(NUM_PROMPTS)]
    assert {"temperature": 0.0} in samplings
    assert any("seed" in one and "frequency_penalty" not in one for one in samplings)
    assert any("seed" in one and "frequency_penalty" in one for one in samplings)


class Cluster:
    applications = (FAKE,)

    def __init__(self, stopped=()):
        self.stopped = lambda: list(stopped)


class Whole:
    def __init__(self, is_whole):
        self.look = lambda: is_whole


@pytest.mark.parametrize(
    ("connected", "stopped", "expected"),
    [
        ([3.0, 3.0], (), True),
        ([3.0, 2.0], (), True),
        ([3.0, 1.0], (), False),
        ([3.0], (), False),
        ([], (), False),
        ([3.0, 3.0], ("one",), False),
    ],
)
def test_an_engine_is_killed_only_beside_a_live_one(monkeypatch, connected, stopped, expected):
    monkeypatch.setattr("tests.integration.chaos.spares.read_metric", lambda *_: connected)
    spares = Spares(Cluster(stopped), Whole(False), [])
    assert spares.allow(KillKind.ENGINE) is expected
    assert spares.allow(KillKind.STOP) is expected
    assert spares.allow(KillKind.INGRESS)
    assert not spares.allow(KillKind.RAYLET), "not all is whole"
    assert Spares(Cluster(), Whole(True), []).allow(KillKind.RAYLET)


def test_what_metrics_say_right_after_a_kill_is_of_the_time_before(monkeypatch):
    monkeypatch.setattr("tests.integration.chaos.spares.read_metric", lambda *_: [3.0, 3.0])
    just_now = [engines(1, at_s=time.monotonic())]
    assert not Spares(Cluster(), Whole(True), just_now).allow(KillKind.ENGINE)
    long_ago = [engines(1, at_s=time.monotonic() - 60)]
    assert Spares(Cluster(), Whole(True), long_ago).allow(KillKind.ENGINE)


def test_what_a_fake_engine_must_answer_follows_from_the_prompt():
    request = draw_request(FAKE, random.Random(1))
    expected = Answers().expected(FAKE, request).token_ids
    assert len(expected) == request.max_tokens
    assert expected[0] == (request.prompt[-1] + 1) % 4096
