"""Per-key limits: requests, tokens, concurrency; and that every lease gives back what it holds."""

import pytest

from service.errors import ApiError, ApiErrorCode
from service.security.quota import KeyLimits, UnlimitedQuota, make_quota


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def refusal(call, *arguments):
    with pytest.raises(ApiError, match="team-a") as raised:
        call(*arguments)
    assert raised.value.code is ApiErrorCode.RATE_LIMITED
    return raised.value.retry_after_s


def quota(clock, **limits):
    return make_quota("team-a", KeyLimits(**limits), clock)


def test_requests_per_minute_say_when_to_come_back(clock):
    q = quota(clock, requests_per_minute=2)
    q.admit().end(0)
    q.admit().end(0)
    assert refusal(q.admit) == 30
    clock.now_s += 30
    q.admit()


def test_concurrency_counts_from_admission_to_end_and_ending_twice_is_once(clock):
    q = quota(clock, max_concurrent_requests=2)
    first, _second = q.admit(), q.admit()
    refusal(q.admit)
    first.end(5)
    first.end(5)
    first.cancel()
    q.admit()
    refusal(q.admit)


def test_output_tokens_are_charged_at_the_end_and_refuse_the_next_request(clock):
    q = quota(clock, tokens_per_minute=60)
    lease = q.admit()
    lease.charge_prompt(40)
    lease.end(50)
    assert refusal(q.admit) == 31
    clock.now_s += 31
    q.admit()


def test_a_prompt_that_the_minute_has_no_room_for_is_refused(clock):
    q = quota(clock, tokens_per_minute=60)
    q.admit().charge_prompt(50)
    assert refusal(q.admit().charge_prompt, 20) == 10


def test_a_request_that_never_ran_is_charged_no_tokens(clock):
    q = quota(clock, tokens_per_minute=60, max_concurrent_requests=1)
    lease = q.admit()
    lease.charge_prompt(60)
    lease.cancel()
    q.admit().charge_prompt(60)


def test_a_refused_request_takes_nothing_from_the_other_limits(clock):
    q = quota(clock, requests_per_minute=2, max_concurrent_requests=1)
    lease = q.admit()
    refusal(q.admit)
    lease.end(0)
    q.admit()


def test_no_limits_remember_nothing(clock):
    assert isinstance(quota(clock), UnlimitedQuota)


def test_every_sequence_of_a_request_takes_a_place_until_it_ends(clock):
    q = quota(clock, max_concurrent_requests=8)
    first, second = q.admit(), q.admit()
    first.take_sequences(5)
    second.take_sequences(3)
    refusal(q.admit)
    second.end(0)
    third = q.admit()
    assert refusal(third.take_sequences, 4) == 1
    third.take_sequences(3)
    first.end(0)
    q.admit().take_sequences(5)


def test_what_may_run_one_after_the_other_takes_the_places_there_are(clock):
    q = quota(clock, max_concurrent_requests=8)
    first, second, third = q.admit(), q.admit(), q.admit()
    assert first.take_up_to(4) == 4
    assert second.take_up_to(2048) == 3
    assert third.take_up_to(2048) == 1
    refusal(q.admit)
    second.end(0)
    assert q.admit().take_up_to(2) == 2


def test_what_may_never_run_at_once_is_the_requests_own_fault(clock):
    q = quota(clock, max_concurrent_requests=8)
    lease = q.admit()
    with pytest.raises(ApiError, match="64") as raised:
        lease.take_sequences(64)
    assert (raised.value.code, raised.value.param) == (ApiErrorCode.LIMIT_EXCEEDED, "n")
    assert raised.value.retry_after_s is None
    lease.cancel()
    q.admit().take_sequences(8)


def test_sequences_count_for_no_other_limit(clock):
    q = quota(clock, requests_per_minute=2, tokens_per_minute=100)
    for _ in range(2):
        lease = q.admit()
        lease.take_sequences(64)
        lease.charge_prompt(10)
        lease.end(20)
    refusal(q.admit)
