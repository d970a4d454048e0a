"""Mixed steps whose decode rows have a call of their own, on the device against float64."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.flash_attention_fp8 import Fp8FlashAttentionBackend
from attention.features import Feature
from tests.gpu.attention.device_cases import (
    BF16_TOLERANCE,
    FP8_TOLERANCE,
    LAYERS,
    MIXED,
    device_case,
    device_spec,
    fp8_twin,
    oracle,
)
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.proofs.cells import proves
from tests.unit.attention.cases import PAGE_SIZES, relative_error, rows_of

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

MANY = rows_of(*[(1 + 37 * i % 1300, 1) for i in range(130)], (0, 700), (129, 31), (64, 1), (0, 1))


class TwoCalls(FlashAttentionBackend):
    min_decode_rows: ClassVar[int] = 1
    max_prompt_tokens_per_decode_row: ClassVar[int] = 1 << 30


class TwoFp8Calls(Fp8FlashAttentionBackend):
    min_decode_rows: ClassVar[int] = 1
    max_prompt_tokens_per_decode_row: ClassVar[int] = 1 << 30


@proves("fa3", Feature.MIXED)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_both_calls_fill_one_result(layer, page_size):
    check(MIXED, layer, page_size)


@pytest.mark.parametrize(
    ("layer", "page_size"),
    [("plain", 1), ("window", 64), ("cap", 256), ("sinks", 16), ("everything", 128)],
)
def test_both_calls_of_many_rows_fill_one_result(layer, page_size):
    check(MANY, LAYERS[layer], page_size)


def check(rows, layer, page_size):
    spec = device_spec(rows, layer=layer, page_size=page_size, layout_seed=page_size)
    case = device_case(spec)
    assert relative_error(case.run(TwoCalls), oracle(case)) < BF16_TOLERANCE


@proves("fa3_fp8", Feature.MIXED, Feature.FP8_KV)
@pytest.mark.parametrize("page_size", [16, 128])
def test_both_calls_read_an_e4m3_cache(page_size):
    case = device_case(device_spec(MANY, page_size=page_size))
    out = fp8_twin(case, 0.02, 0.03).run(TwoFp8Calls)
    assert relative_error(out, oracle(case)) < FP8_TOLERANCE


@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("head_dim", [64, 256])
def test_other_heads(group, head_dim):
    spec = device_spec(MANY, kv_heads=8 // group, head_dim=head_dim, v_head_dim=head_dim)
    case = device_case(spec)
    assert relative_error(case.run(TwoCalls), oracle(case)) < BF16_TOLERANCE


def test_no_call_touches_the_other_s_rows():
    """The prefill call gets the whole output; rows of the decode call stay as they are."""
    case = device_case(device_spec(MANY, page_size=128))
    expected = case.run(TwoCalls)
    backend = TwoCalls(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    batch = replace(case.batch, attn_backend=backend)
    backend.init_forward_metadata(batch)
    metadata = backend._step_metadata(case.layer)
    parts = backend._cut(case.layer, metadata, batch)
    assert parts is not None
    out = torch.full_like(expected, 7.0)
    backend._attend(case.q, case.layer, parts.prefill, None, out)
    assert (out[: parts.num_decode_rows] == 7.0).all()
    assert torch.equal(out[parts.num_decode_rows :], expected[parts.num_decode_rows :])
