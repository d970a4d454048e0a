"""The floor, against the figures worked out by hand for Llama-3.1-8B shapes on an H200."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig

from attention.hardware import H200
from service.bench.profile.floor import ModelCost, StepShape, model_cost

CONFIG = Path(__file__).parents[5] / "benchmarks" / "h200" / "models" / "llama-3.1-8b.json"


@pytest.fixture(scope="module")
def cost() -> ModelCost:
    return model_cost(LlamaConfig(**json.loads(CONFIG.read_text())), torch.bfloat16)


def decode(num_streams: int, context: int) -> StepShape:
    return StepShape(
        np.full(num_streams, context, dtype=np.int32), np.ones(num_streams, dtype=np.int32)
    )


def test_the_embedding_is_not_read_and_the_head_is(cost: ModelCost) -> None:
    assert cost.head_weights == 128256 * 4096
    per_layer = 4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 14336
    assert cost.body_weights == 32 * per_layer
    assert cost.attention.kv_bytes_per_token == 131072


@pytest.mark.parametrize(
    ("streams", "context", "expected_ms"), [(1, 1152, 3.46), (64, 1152, 5.6), (256, 256, 7.5)]
)
def test_decode_floors_are_those_of_the_tables(
    cost: ModelCost, streams: int, context: int, expected_ms: float
) -> None:
    floor = cost.floor(decode(streams, context), H200)
    assert floor.step_s * 1e3 == pytest.approx(expected_ms, rel=0.02)


def test_prefill_is_bound_by_products_and_one_row_a_request_meets_the_head(
    cost: ModelCost,
) -> None:
    lengths = np.full(8, 1024, dtype=np.int32)
    shape = StepShape(lengths, lengths)
    flops = 2 * (cost.body_weights * 8192 + cost.head_weights * 8)
    assert cost.gemm_cost(shape).flops == flops
    assert cost.floor(shape, H200).gemm_s == pytest.approx(flops / H200.flops_per_s)
