"""A workload is reproducible, shares what it should share, and nothing else."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.bench.arrivals import fixed_arrivals, poisson_arrivals
from service.bench.lengths import FixedLength, UniformLength
from service.bench.workload import (
    BenchRequest,
    RequestStream,
    WorkloadShape,
    generate_requests,
)

LENGTHS = UniformLength(10, 60)


def shape(**changes: object) -> WorkloadShape:
    values = {"input_len": LENGTHS, "output_len": LENGTHS, "vocab_size": 1000, **changes}
    return WorkloadShape(**values)  # type: ignore[arg-type]


def take(count: int, a_shape: WorkloadShape, *stream: RequestStream) -> list[BenchRequest]:
    return list(islice(generate_requests(a_shape, *stream), count))


def test_the_same_seed_gives_the_same_requests_and_another_seed_gives_others() -> None:
    assert take(20, shape(seed=5)) == take(20, shape(seed=5))
    assert take(20, shape(seed=5)) != take(20, shape(seed=6))


def test_warm_up_and_measured_prompts_have_nothing_in_common() -> None:
    sharing = shape(prefix_share=0.5)
    measured = {tuple(r.prompt_token_ids[:5]) for r in take(50, sharing)}
    warmup = {tuple(r.prompt_token_ids[:5]) for r in take(50, sharing, RequestStream.WARMUP)}
    assert not measured & warmup


@given(share=st.floats(0, 1), groups=st.integers(1, 5), seed=st.integers(0, 2**32))
def test_a_prompts_shared_part_is_its_groups_and_the_rest_is_its_own(
    share: float, groups: int, seed: int
) -> None:
    requests = take(30, shape(prefix_share=share, num_prefix_groups=groups, seed=seed))
    for request in requests:
        assert request.num_shared_tokens == int(len(request.prompt_token_ids) * share)
        assert 10 <= len(request.prompt_token_ids) <= 60
        assert 10 <= request.max_tokens <= 60
        assert all(0 <= token_id < 1000 for token_id in request.prompt_token_ids)
    for one in requests:
        for other in requests:
            if one.group == other.group:
                both = min(one.num_shared_tokens, other.num_shared_tokens)
                assert one.prompt_token_ids[:both] == other.prompt_token_ids[:both]


def test_without_sharing_no_two_prompts_begin_alike() -> None:
    beginnings = {tuple(r.prompt_token_ids[:8]) for r in take(200, shape())}
    assert len(beginnings) == 200


def test_groups_have_prefixes_of_their_own_and_all_are_used() -> None:
    requests = take(200, shape(prefix_share=1.0, num_prefix_groups=4, input_len=FixedLength(16)))
    assert len({tuple(r.prompt_token_ids) for r in requests}) == 4
    assert {r.group for r in requests} == {0, 1, 2, 3}


def test_words_repeat_the_structure_of_the_token_ids() -> None:
    one = BenchRequest(0, [1, 2, 3, 900], 1)
    other = BenchRequest(1, [1, 2, 3, 901], 1)
    assert len(one.as_words().split()) == 4
    assert one.as_words().split()[:3] == other.as_words().split()[:3]
    assert one.as_words() != other.as_words()


def test_fixed_arrivals_are_evenly_spaced_from_zero() -> None:
    assert list(islice(fixed_arrivals(4.0), 4)) == [0, 0.25, 0.5, 0.75]


def test_poisson_gaps_are_exponential_with_the_rates_mean() -> None:
    due_s = np.array(list(islice(poisson_arrivals(50.0, seed=1), 20_000)))
    gaps = np.diff(due_s, prepend=0)
    assert (gaps >= 0).all()
    assert gaps.mean() == pytest.approx(0.02, rel=0.03)
    assert gaps.std() == pytest.approx(0.02, rel=0.03)
    assert np.quantile(gaps, 0.5) == pytest.approx(0.02 * np.log(2), rel=0.05)


def test_poisson_arrivals_follow_their_seed() -> None:
    first = list(islice(poisson_arrivals(10.0, seed=1), 10))
    assert first == list(islice(poisson_arrivals(10.0, seed=1), 10))
    assert first != list(islice(poisson_arrivals(10.0, seed=2), 10))


def test_an_infinite_rate_makes_everything_due_at_once() -> None:
    assert set(islice(poisson_arrivals(float("inf"), seed=0), 5)) == {0.0}
    assert set(islice(fixed_arrivals(float("inf")), 5)) == {0.0}
