"""What admission leaves for running requests: the forecast of their output and of their pages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.scheduler.output_forecast import OutputForecast, peak_growth_pages


def ints(values):
    return np.array(values, dtype=np.int32)


def growth_step_by_step(num_tokens, new_tokens, given_back, page_size):
    """Pages beyond today's, before each of the steps that are still to come."""
    most = 0
    for step in range(max(new_tokens, default=0) + 1):
        total = 0
        for held, new, back in zip(num_tokens, new_tokens, given_back, strict=True):
            is_running = new >= step
            grown = -(-(held + step) // page_size) - -(-held // page_size)
            total += grown if is_running else -back
        most = max(most, total)
    return most


requests = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 40)), max_size=12)


@given(requests)
def test_with_pages_of_one_token_the_peak_is_exact(rows) -> None:
    held, new = [row[0] for row in rows], [row[1] for row in rows]
    expected = growth_step_by_step(held, new, held, 1)
    assert peak_growth_pages(ints(held), ints(new), ints(held), 1) == expected


@given(requests, st.sampled_from([4, 16]))
def test_with_larger_pages_it_errs_by_a_page_a_request_at_most(rows, page_size) -> None:
    held, new = [row[0] for row in rows], [row[1] for row in rows]
    back = [-(-tokens // page_size) for tokens in held]
    expected = growth_step_by_step(held, new, back, page_size)
    found = peak_growth_pages(ints(held), ints(new), ints(back), page_size)
    assert expected - len(rows) <= found <= expected


def test_requests_that_end_in_turn_need_less_than_all_together() -> None:
    held, new = ints([100, 100, 100]), ints([10, 200, 400])
    together = peak_growth_pages(held, ints([400, 400, 400]), held, 1)
    assert peak_growth_pages(held, new, held, 1) < together == 1200


def finish(forecast, share, number):
    for _ in range(number):
        forecast.on_finish(int(1000 * share), 1000)
        forecast.on_step()


def test_short_answers_teach_it_to_expect_little_but_not_nothing() -> None:
    forecast = OutputForecast()
    finish(forecast, 0.01, 3000)
    assert forecast.ratio == pytest.approx(0.1)
    assert forecast.new_tokens(ints([0, 100])).tolist() == [0, 10]


def test_answers_to_the_limit_teach_it_to_expect_all() -> None:
    forecast = OutputForecast()
    finish(forecast, 1.0, 300)
    assert forecast.ratio == 1.0


def test_a_retraction_raises_it_at_once() -> None:
    forecast = OutputForecast()
    finish(forecast, 0.3, 3000)
    before = forecast.ratio
    forecast.on_retraction()
    assert forecast.ratio == pytest.approx(before + 0.1)
    assert before == pytest.approx(0.33, abs=0.01)


def test_a_context_of_any_length_counts_as_4096_tokens_at_most() -> None:
    forecast = OutputForecast()
    finish(forecast, 1.0, 300)
    assert forecast.new_tokens(ints([131_072])).tolist() == [4096]
