"""Whom a lost replica counts against, and whose turn it is."""

from dataclasses import dataclass, field

import pytest

from service.request_context import RequestContext
from service.routing.suspects import TRIAL_TOKENS, Suspects

MAX_LOSSES = 6


@dataclass(eq=False)
class Stream:
    """What the rules ask of a stream."""

    replica_id: str = ""
    context: RequestContext = field(default_factory=RequestContext)
    is_ended: bool = False
    num_new_tokens: int = 0
    lost_s: float | None = None

    @property
    def num_losses(self):
        return self.context.losses.num_replicas


@pytest.fixture
def suspects(clock):
    return Suspects(MAX_LOSSES, max_turn_wait_s=10.0, clock=clock)


@pytest.fixture
def clock():
    """Call it for the time; now_s may be set."""

    def now():
        return now.now_s

    now.now_s = 100.0
    return now


def send(suspects, stream, replica_id):
    assert suspects.may_go(stream)
    suspects.on_sent(stream)
    stream.replica_id, stream.num_new_tokens = replica_id, 0


def lose(suspects, replica_id, *streams):
    suspects.on_disconnect(replica_id)
    for stream in streams:
        assert stream.replica_id == replica_id
        stream.replica_id = ""
        suspects.charge(stream)


def suspect(suspects, context=None):
    stream = Stream(context=context or RequestContext())
    stream.context.losses.num_replicas = 2
    stream.context.losses.is_last_soon = True
    return stream


def losses(*streams):
    return [stream.num_losses for stream in streams]


def test_a_loss_counts_against_all_while_nobody_is_on_trial(suspects):
    streams = [Stream("a"), Stream("a")]
    lose(suspects, "a", *streams)
    assert losses(*streams) == [1, 1]
    assert not any(map(suspects.is_suspect, streams))
    for stream in streams:
        send(suspects, stream, "b")
    lose(suspects, "b", *streams)
    assert losses(*streams) == [2, 2]
    assert all(map(suspects.is_suspect, streams))


@pytest.mark.parametrize("num_new_tokens", [TRIAL_TOKENS - 1, TRIAL_TOKENS])
def test_who_got_tokens_enough_at_the_lost_replica_is_no_suspect(suspects, num_new_tokens):
    streams = [Stream("a"), Stream("a")]
    lose(suspects, "a", *streams)
    for stream in streams:
        send(suspects, stream, "b")
    streams[1].num_new_tokens = num_new_tokens
    lose(suspects, "b", *streams)
    assert losses(*streams) == [2, 2]
    assert suspects.is_suspect(streams[0])
    assert suspects.is_suspect(streams[1]) == (num_new_tokens < TRIAL_TOKENS)


def test_a_request_of_which_one_choice_had_just_come_is_a_suspect(suspects):
    context = RequestContext()
    context.losses.num_replicas = 1
    choices = [Stream("a", context, num_new_tokens=number) for number in (100, 0, 100)]
    lose(suspects, "a", *choices)
    assert all(map(suspects.is_suspect, choices))


@pytest.mark.parametrize("is_told_first", [True, False])
def test_a_loss_counts_against_the_one_that_is_on_trial_there(suspects, is_told_first):
    tried, other = suspect(suspects), Stream("a")
    send(suspects, tried, "a")
    lose(suspects, "a", *([tried, other] if is_told_first else [other, tried]))
    assert losses(tried, other) == [3, 0]
    assert not suspects.has_lost_enough(tried)
    send(suspects, tried, "b")
    lose(suspects, "b", tried)
    assert suspects.has_lost_enough(tried)
    assert not suspects.may_go(tried)


def test_a_loss_elsewhere_says_nothing_of_the_one_on_trial(suspects):
    tried, other = suspect(suspects), Stream("b")
    send(suspects, tried, "a")
    lose(suspects, "b", other)
    assert losses(tried, other) == [2, 1]


def test_after_its_trial_a_request_is_one_of_many(suspects):
    tried, other = suspect(suspects), Stream("a")
    send(suspects, tried, "a")
    tried.num_new_tokens = TRIAL_TOKENS
    lose(suspects, "a", tried, other)
    assert losses(tried, other) == [3, 1]
    assert tried.context.losses.num_trials == 0


def test_however_many_tokens_came_between_there_is_a_last_loss(suspects):
    stream = Stream()
    for number in range(MAX_LOSSES):
        assert not suspects.has_lost_enough(stream)
        send(suspects, stream, str(number))
        stream.num_new_tokens = 10_000
        lose(suspects, str(number), stream)
    assert suspects.has_lost_enough(stream)


@pytest.mark.parametrize("end", ["tokens", "ended", "lost"])
def test_one_suspect_at_a_time(suspects, end):
    first, second = suspect(suspects), suspect(suspects)
    send(suspects, first, "a")
    assert not suspects.may_go(second)
    assert suspects.may_go(first), "its replica may refuse it"
    assert suspects.may_go(Stream())
    if end == "tokens":
        first.num_new_tokens = TRIAL_TOKENS
    elif end == "ended":
        first.is_ended = True
    else:
        lose(suspects, "a", first)
    assert suspects.may_go(second)


def test_who_has_waited_long_enough_goes_out_of_turn_and_leaves_the_trial_alone(suspects, clock):
    first, second, third = (suspect(suspects) for _ in range(3))
    send(suspects, first, "a")
    assert not suspects.may_go(second)
    clock.now_s = 109.5
    assert not suspects.may_go(second)
    clock.now_s = 110.0
    send(suspects, second, "b")
    assert not suspects.may_go(third), "the first one is still on trial"
    lose(suspects, "a", first)
    assert losses(first, second) == [3, 2]
    assert first.context.losses.num_trials == 1


@pytest.mark.parametrize("healing_s", [2.0, 54.0, 60.0, 600.0])
def test_the_time_without_a_replica_is_no_waiting_for_a_turn(suspects, clock, healing_s):
    first, second, third = (suspect(suspects) for _ in range(3))
    send(suspects, first, "a")
    for stream in (first, second, third):
        stream.lost_s = clock.now_s
    assert not suspects.may_go(second)
    clock.now_s += 4.0
    lose(suspects, "a", first)
    assert suspects.turn_left_s(second) == 0.0, "it waits for a replica"
    clock.now_s += healing_s
    send(suspects, first, "b")
    for stream in (second, third):
        assert not suspects.may_go(stream)
    assert suspects.turn_left_s(second) == 6.0, "what it waited before counts"
    assert suspects.turn_left_s(third) == 10.0
    clock.now_s += 6.0
    send(suspects, second, "b")
    assert not suspects.may_go(third)


def test_who_is_asked_before_a_lost_trial_is_told_waits_for_a_replica_from_then_on(suspects, clock):
    first, second, third = (suspect(suspects) for _ in range(3))
    send(suspects, first, "a")
    for stream in (second, third):
        assert not suspects.may_go(stream)
    suspects.on_disconnect("a")
    for stream in (second, third):
        assert not suspects.may_go(stream), "it could be a choice of the same request"
    first.replica_id = ""
    suspects.charge(first)
    clock.now_s += 54.0
    send(suspects, second, "b")
    assert not suspects.may_go(third)
    assert suspects.turn_left_s(third) == 10.0


def test_nobody_waits_for_a_turn_while_nobody_is_on_trial(suspects, clock):
    """A replica that is lost after a trial has ended there, and before the next one began."""
    first, second, third = (suspect(suspects) for _ in range(3))
    send(suspects, first, "a")
    for stream in (second, third):
        assert not suspects.may_go(stream)
    clock.now_s += 1.0
    first.num_new_tokens = TRIAL_TOKENS
    lose(suspects, "a", first)
    for stream in (second, third):
        assert suspects.may_go(stream), "but no replica is there"
    clock.now_s += 60.0
    send(suspects, second, "b")
    assert not suspects.may_go(third)
    assert suspects.turn_left_s(third) == 9.0


def test_who_lets_others_go_first_has_its_whole_time_after_each_loss(suspects, clock):
    first, second = suspect(suspects), suspect(suspects)
    send(suspects, first, "a")
    assert not suspects.may_go(second)
    clock.now_s += 10.0
    send(suspects, second, "a")
    lose(suspects, "a", first, second)
    for stream in (first, second):
        suspects.begin_waiting(stream)
        assert suspects.turn_left_s(stream) == 10.0


def test_a_loss_of_several_suspects_counts_against_all_of_them_and_is_no_trial(suspects, clock):
    first, second, third, other = *(suspect(suspects) for _ in range(3)), Stream("a")
    send(suspects, first, "a")
    for stream in (second, third):
        assert not suspects.may_go(stream)
    clock.now_s = 110.0
    for stream in (second, third):
        send(suspects, stream, "a")
    third.num_new_tokens = TRIAL_TOKENS
    lose(suspects, "a", first, second, third, other)
    assert losses(first, second, third, other) == [3, 3, 2, 0]
    assert first.context.losses.num_trials == second.context.losses.num_trials == 0


def test_choices_of_one_request_are_charged_once_and_together(suspects):
    context = RequestContext()
    choices = [Stream("a", context), Stream("a", context)]
    lose(suspects, "a", *choices)
    assert losses(*choices) == [1, 1]
    for choice in choices:
        send(suspects, choice, "b")
    lose(suspects, "b", *choices)
    send(suspects, choices[0], "c")
    assert not suspects.may_go(choices[1])
    lose(suspects, "c", choices[0])
    send(suspects, choices[1], "d")
    lose(suspects, "d", choices[1])
    assert all(map(suspects.has_lost_enough, choices))
