"""Length distributions stay in their bounds, have their shape, and are read from flags."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.bench.lengths import (
    FixedLength,
    LengthDistribution,
    LengthSpecError,
    LognormalLength,
    UniformLength,
    parse_length,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("128", FixedLength(128)),
        ("uniform:64:256", UniformLength(64, 256)),
        ("lognormal:100:0.5:800", LognormalLength(100, 0.5, 800)),
    ],
)
def test_flags_are_read(text: str, expected: LengthDistribution) -> None:
    assert parse_length(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0",
        "-4",
        "1.5",
        "many",
        "uniform:5",
        "uniform:9:3",
        "uniform:0:3",
        "uniform:a:b",
        "lognormal:10:0:20",
        "lognormal:10:inf:20",
        "lognormal:30:1:20",
        "zipf:1:2",
    ],
)
def test_flags_that_make_no_sense_are_refused_with_their_text(text: str) -> None:
    with pytest.raises(LengthSpecError, match="is not a length|must|no number") as caught:
        parse_length(text)
    assert repr(text) in str(caught.value)


@given(
    low=st.integers(1, 50), extra=st.integers(0, 50), sigma=st.floats(0.01, 50), seed=st.integers(0)
)
def test_samples_lie_between_one_and_the_maximum(
    low: int, extra: int, sigma: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    for lengths in (UniformLength(low, low + extra), LognormalLength(low, sigma, low + extra)):
        draws = [lengths.sample(rng) for _ in range(50)]
        assert all(1 <= draw <= lengths.max_tokens for draw in draws)
        assert all(type(draw) is int for draw in draws)


def test_uniform_reaches_both_ends_and_centres_between() -> None:
    rng = np.random.default_rng(0)
    draws = [UniformLength(3, 7).sample(rng) for _ in range(5000)]
    assert (min(draws), max(draws)) == (3, 7)
    assert np.mean(draws) == pytest.approx(5, abs=0.1)


def test_lognormal_has_its_median_and_spread() -> None:
    rng = np.random.default_rng(0)
    draws = [LognormalLength(1000, 0.5, 1_000_000).sample(rng) for _ in range(20_000)]
    assert np.median(draws) == pytest.approx(1000, rel=0.02)
    assert np.std(np.log(draws)) == pytest.approx(0.5, rel=0.02)
