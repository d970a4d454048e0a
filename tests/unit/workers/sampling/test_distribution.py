"""Seeds draw from exactly the distribution that temperature and the filters define.

Each test draws one token for each of many seeds, all in one batch, and compares the counts with
the exact probabilities by a chi-square test. Seeds are fixed: a verdict never changes by chance.
"""

import math

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.unit.workers.sampling.cases import admitted, make_state, random_logits, sample_each
from workers.sampling.params import SamplingParams

NUM_DRAWS = 10_000
MIN_EXPECTED = 8.0


def chi_square_excess(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """Standard deviations of the statistic above its mean; rare tokens are pooled."""
    expected = probs.double() * counts.sum()
    is_rare = expected < MIN_EXPECTED
    observed = torch.cat([counts[~is_rare].double(), counts[is_rare].double().sum().view(1)])
    expected = torch.cat([expected[~is_rare], expected[is_rare].sum().view(1)])
    if expected[-1] < MIN_EXPECTED:
        assert observed[-1] <= 3 * MIN_EXPECTED
        observed, expected = observed[:-1], expected[:-1]
    degrees = len(expected) - 1
    if degrees == 0:
        return 0.0
    statistic = ((observed - expected) ** 2 / expected).sum().item()
    return (statistic - degrees) / math.sqrt(2 * degrees)


def _draw(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """Counts per token over NUM_DRAWS consecutive seeds."""
    token_ids = sample_each(logits.repeat(NUM_DRAWS, 1), [sampling] * NUM_DRAWS).token_ids
    return torch.bincount(token_ids, minlength=logits.shape[1])


def _exact(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    chain = LogitsProcessorList([TemperatureLogitsWarper(sampling.temperature)])
    if sampling.min_p > 0:
        chain.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k > 0:
        chain.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        chain.append(TopPLogitsWarper(sampling.top_p))
    return chain(torch.zeros(1, 0, dtype=torch.long), logits.double())[0].softmax(-1)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(temperature=2.0),
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=1.5, top_p=0.5),
        SamplingParams(min_p=0.05),
        SamplingParams(temperature=2.0, min_p=0.2),
        SamplingParams(top_k=10),
        SamplingParams(temperature=0.8, top_k=70),
        SamplingParams(temperature=1.3, top_k=20, top_p=0.8),
        SamplingParams(temperature=1.3, top_k=80, top_p=0.8, min_p=0.01),
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(sampling: SamplingParams) -> None:
    logits = random_logits(1, 100, scale=1.5)
    counts, exact = _draw(logits, sampling), _exact(logits, sampling)
    assert counts[exact == 0].sum() == 0
    assert chi_square_excess(counts, exact) < 4


def test_the_chi_square_test_notices_a_slightly_wrong_temperature() -> None:
    logits = random_logits(1, 100, scale=1.5)
    counts = _draw(logits, SamplingParams(temperature=1.0))
    assert chi_square_excess(counts, _exact(logits, SamplingParams(temperature=1.1))) > 10


def test_rare_tokens_come_as_often_as_they_should() -> None:
    # Four tokens of probability 1e-3 each and one of 1e-4 beside one that takes the rest.
    probs = torch.tensor([[0.9959, 1e-3, 1e-3, 1e-3, 1e-3, 1e-4]])
    counts = _draw(probs.log(), SamplingParams())
    expected = 4e-3 * NUM_DRAWS
    assert counts[1:5].sum().item() == pytest.approx(expected, abs=4 * math.sqrt(expected))
    assert counts[5].item() <= 2 + 4 * math.sqrt(2)


def test_positions_of_one_seed_are_independent_draws() -> None:
    logits = random_logits(1, 12, scale=1.0)
    num_steps = 6000
    state = make_state(12, 1)
    state.admit([admitted(0, SamplingParams(), seed=42)])
    slots = np.zeros(num_steps, dtype=np.int32)
    lengths = np.arange(num_steps, dtype=np.int32)
    token_ids = state.sample(logits.repeat(num_steps, 1), slots, lengths).token_ids
    probs = logits.double().softmax(-1)[0]
    assert chi_square_excess(torch.bincount(token_ids, minlength=12), probs) < 4
    pairs = torch.bincount(token_ids[:-1] * 12 + token_ids[1:], minlength=144)
    assert chi_square_excess(pairs, torch.outer(probs, probs).flatten()) < 4
