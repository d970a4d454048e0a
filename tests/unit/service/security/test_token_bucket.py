"""TokenBucket against a clock that the test turns."""

from hypothesis import given
from hypothesis import strategies as st

from service.security.token_bucket import TokenBucket


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def test_a_minutes_worth_goes_at_once_and_then_at_the_rate():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    for _ in range(60):
        assert bucket.wait_s(1) == 0
        bucket.take(1)
    assert bucket.wait_s(1) == 1
    clock.now_s += 1
    assert bucket.wait_s(1) == 0
    assert bucket.wait_s(2) == 1


def test_idle_time_saves_no_more_than_a_minutes_worth():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    clock.now_s += 3600
    bucket.take(60)
    assert bucket.wait_s(1) == 1


def test_a_debt_is_paid_off_before_anything_is_given():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(90)
    assert bucket.wait_s(1) == 31
    clock.now_s += 31
    assert bucket.wait_s(1) == 0


def test_more_than_a_minutes_worth_needs_a_full_bucket():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    assert bucket.wait_s(1000) == 0
    bucket.take(1)
    assert bucket.wait_s(1000) == 1


def test_a_clock_that_goes_back_takes_nothing():
    clock = Clock()
    bucket = TokenBucket(60, clock)
    bucket.take(60)
    clock.now_s -= 50
    assert bucket.wait_s(1) == 1


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=60),
)
def test_never_more_than_a_minutes_worth_and_the_rate_since(per_minute, steps):
    clock = Clock()
    bucket = TokenBucket(per_minute, clock)
    taken = 0
    for elapsed_s, amount in steps:
        clock.now_s += elapsed_s
        if amount <= per_minute and bucket.wait_s(amount) == 0:
            bucket.take(amount)
            taken += amount
        assert taken <= per_minute * (1 + (clock.now_s - 100) / 60) + 1e-6
