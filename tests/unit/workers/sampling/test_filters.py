"""Each filter keeps the tokens that the warper of transformers keeps."""

import math

import pytest
import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from tests.unit.workers.sampling.cases import random_logits
from workers.sampling.filters import (
    TOP_P_OFF,
    mask_min_p_,
    mask_sorted_,
    mask_top_k_,
    mask_top_p_,
    scale_by_temperature,
)

NO_INPUT_IDS = torch.zeros(1, 0, dtype=torch.long)


def _column(value: float, num_rows: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((num_rows, 1), value, dtype=dtype)


def _scaled(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    row_max = logits.amax(dim=-1, keepdim=True)
    return scale_by_temperature(logits, row_max, _column(temperature, len(logits)))


def _assert_same_distribution(scaled: torch.Tensor, reference: torch.Tensor) -> None:
    assert torch.equal(scaled == -math.inf, reference == -math.inf)
    torch.testing.assert_close(scaled.softmax(-1), reference.softmax(-1), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.0])
def test_temperature_scales_as_transformers(temperature: float) -> None:
    logits = random_logits(20, 301)
    reference = TemperatureLogitsWarper(temperature)(NO_INPUT_IDS, logits)
    _assert_same_distribution(_scaled(logits, temperature), reference)


@pytest.mark.parametrize("min_p", [0.001, 0.05, 0.3, 0.99, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float) -> None:
    logits = random_logits(40, 301)
    masked = mask_min_p_(_scaled(logits), _column(math.log(min_p), 40))
    _assert_same_distribution(masked, MinPLogitsWarper(min_p)(NO_INPUT_IDS, logits))


@pytest.mark.parametrize("top_k", [1, 2, 64, 65, 300, 301])
def test_top_k_keeps_what_transformers_keeps(top_k: int) -> None:
    logits = random_logits(40, 301)
    masked = mask_top_k_(_scaled(logits), _column(top_k, 40, torch.int64))
    _assert_same_distribution(masked, TopKLogitsWarper(top_k)(NO_INPUT_IDS, logits))


def test_top_k_keeps_all_that_tie_with_the_kth_as_transformers() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 3.0], [1.0] * 6])
    masked = mask_top_k_(_scaled(logits), _column(2, 2, torch.int64))
    _assert_same_distribution(masked, TopKLogitsWarper(2)(NO_INPUT_IDS, logits))


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("scale", [0.3, 3.0, 12.0])
def test_top_p_keeps_what_transformers_keeps(top_p: float, scale: float) -> None:
    logits = random_logits(40, 301, scale)
    masked = mask_top_p_(_scaled(logits), _column(top_p, 40))
    _assert_same_distribution(masked, TopPLogitsWarper(top_p)(NO_INPUT_IDS, logits))


def test_top_p_keeps_tokens_that_tie_with_the_last_kept_one() -> None:
    masked = mask_top_p_(_scaled(torch.tensor([[0.0, 1.0, 1.0, 1.0, -5.0]])), _column(0.5, 1))
    assert (masked > -math.inf).tolist() == [[False, True, True, True, False]]


def test_top_p_that_underflows_keeps_the_likeliest_token() -> None:
    logits = random_logits(8, 50)
    masked = mask_top_p_(_scaled(logits), _column(0.0, 8))
    assert torch.equal((masked > -math.inf).int().argmax(-1), logits.argmax(-1))
    assert (masked > -math.inf).sum(-1).tolist() == [1] * 8


@pytest.mark.parametrize("top_k", [1, 7, 64])
@pytest.mark.parametrize("top_p", [1e-9, 0.2, 0.8, TOP_P_OFF])
def test_sorted_tokens_are_masked_as_the_whole_vocabulary(top_k: int, top_p: float) -> None:
    scaled = _scaled(random_logits(40, 301))
    values, token_ids = scaled.topk(128, dim=-1)
    mask_sorted_(values, _column(top_k, 40, torch.int64), _column(top_p, 40))
    masked = mask_top_k_(scaled.clone(), _column(top_k, 40, torch.int64))
    if top_p != TOP_P_OFF:
        mask_top_p_(masked, _column(top_p, 40))
    assert torch.equal(torch.full_like(scaled, -math.inf).scatter(1, token_ids, values), masked)


@pytest.mark.parametrize("min_p", [0.01, 0.2])
@pytest.mark.parametrize("top_k", [3, 100])
@pytest.mark.parametrize("top_p", [0.6, 0.95])
def test_all_filters_in_order_equal_the_chain_of_warpers(
    min_p: float, top_k: int, top_p: float
) -> None:
    logits = random_logits(60, 301)
    chain = LogitsProcessorList(
        [
            TemperatureLogitsWarper(1.7),
            MinPLogitsWarper(min_p),
            TopKLogitsWarper(top_k),
            TopPLogitsWarper(top_p),
        ]
    )
    masked = mask_min_p_(_scaled(logits, 1.7), _column(math.log(min_p), 60))
    mask_top_k_(masked, _column(top_k, 60, torch.int64))
    mask_top_p_(masked, _column(top_p, 60))
    _assert_same_distribution(masked, chain(NO_INPUT_IDS, logits))


def test_no_temperature_overflows() -> None:
    logits = torch.tensor([[3.0e38, -3.0e38, 1.0], [1e4, 1e4 - 1, -1e4]])
    scaled = _scaled(logits, 1e-5)
    assert scaled.max(-1).values.tolist() == [0.0, 0.0]
    assert not scaled.isnan().any()
    assert scaled.softmax(-1)[:, 0].tolist() == [1.0, 1.0]


def test_infinite_and_missing_logits_leave_something_to_draw() -> None:
    inf, nan = math.inf, math.nan
    scaled = _scaled(torch.tensor([[inf, 1.0, inf], [-inf] * 3, [1.0, nan, 2.0], [0, -inf, 0]]))
    expected = [[0.0, -inf, 0.0], [0.0] * 3, [0.0] * 3, [0.0, -inf, 0.0]]
    assert scaled.tolist() == expected
