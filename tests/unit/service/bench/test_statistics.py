"""Every figure against the plain formula or numpy on the same samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.bench.load import LoadOutcome
from service.bench.statistics import distribution, inter_token_samples, summarize
from service.bench.trace import RequestFailedError, RequestTrace


def trace(due_s: float, events: list[tuple[float, int]], ended_s: float) -> RequestTrace:
    made = RequestTrace(due_s=due_s, started_s=due_s + 0.001, ended_s=ended_s)
    for time_s, num_tokens in events:
        made.add_event(time_s, num_tokens)
    made.num_output_tokens = sum(max(count, 1) for _, count in events)
    made.num_input_tokens = 10
    return made


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=300))
def test_percentiles_are_numpys(samples: list[float]) -> None:
    result = distribution(samples)
    assert result is not None
    expected = np.quantile(samples, [0.5, 0.9, 0.95, 0.99])
    np.testing.assert_allclose([result.p50, result.p90, result.p95, result.p99], expected)
    assert result.mean == pytest.approx(np.mean(samples))
    assert result.max == max(samples)
    assert result.num_samples == len(samples)


def test_no_samples_have_no_distribution() -> None:
    assert distribution([]) is None


def test_a_gap_is_shared_by_the_tokens_that_end_it() -> None:
    samples = inter_token_samples(trace(0.0, [(1.0, 1), (2.0, 1), (5.0, 3)], 5.0))
    np.testing.assert_allclose(samples, [1.0, 1.0, 1.0, 1.0])


def test_a_delivery_of_unknown_size_counts_as_one_token() -> None:
    samples = inter_token_samples(trace(0.0, [(1.0, 0), (1.5, 0), (3.5, 0)], 4.0))
    np.testing.assert_allclose(samples, [0.5, 2.0])


def test_a_run_is_summed_up() -> None:
    good = [
        trace(10.0, [(10.5, 1), (10.6, 1), (10.8, 2)], 10.9),
        trace(11.0, [(11.25, 1)], 12.0),
    ]
    bad = trace(10.2, [(10.3, 5)], 14.0)
    bad.fail(RequestFailedError("overloaded", "try later"))
    good[0].num_cached_tokens = 4
    outcome = LoadOutcome([good[0], bad, good[1]], [0.001, 0.003])
    result = summarize(outcome, is_open_loop=True)

    assert (result.num_requests, result.num_ok) == (3, 2)
    assert result.errors == {"overloaded": 1}
    assert result.example_error == "try later"
    assert result.elapsed_s == pytest.approx(4.0)
    assert (result.num_input_tokens, result.num_output_tokens) == (20, 5)
    assert result.num_cached_tokens == 4
    assert result.requests_per_s == pytest.approx(0.5)
    assert result.input_tokens_per_s == pytest.approx(5.0)
    assert result.output_tokens_per_s == pytest.approx(1.25)
    assert result.tokens_per_delivery == pytest.approx(5 / 4)
    assert result.ttft_s is not None
    assert result.ttft_s.mean == pytest.approx((0.5 + 0.25) / 2)
    assert result.inter_token_s is not None
    assert result.inter_token_s.num_samples == 3
    assert result.inter_token_s.mean == pytest.approx(0.1)
    assert result.time_per_output_token_s is not None
    assert result.time_per_output_token_s.num_samples == 1
    assert result.time_per_output_token_s.mean == pytest.approx(0.1)
    assert result.end_to_end_s is not None
    assert result.end_to_end_s.p50 == pytest.approx((0.9 + 1.0) / 2)
    assert result.client_lag_s is not None
    assert result.client_lag_s.p99 == pytest.approx(0.001)
    assert result.event_loop_lag_s is not None
    assert result.event_loop_lag_s.max == pytest.approx(0.003)


def test_a_closed_loop_has_no_client_lag() -> None:
    result = summarize(LoadOutcome([trace(0.0, [(1.0, 1)], 1.0)], []), is_open_loop=False)
    assert result.client_lag_s is None
    assert not result.is_client_late


def test_a_late_client_is_called_late() -> None:
    late = trace(0.0, [(1.0, 1)], 1.0)
    late.started_s = 0.5
    assert summarize(LoadOutcome([late], []), is_open_loop=True).is_client_late
    slow_loop = LoadOutcome([trace(0.0, [(1.0, 1)], 1.0)], [0.05] * 10)
    assert summarize(slow_loop, is_open_loop=False).is_client_late


def test_a_run_without_requests_or_successes_is_no_error() -> None:
    assert summarize(LoadOutcome(), is_open_loop=True).num_requests == 0
    failed = trace(0.0, [], 1.0)
    failed.fail(RequestFailedError("x", "y"))
    result = summarize(LoadOutcome([failed]), is_open_loop=True)
    assert result.ttft_s is None
    assert result.output_tokens_per_s == 0.0
