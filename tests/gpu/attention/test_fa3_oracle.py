"""FlashAttention-3 on the device against float64: the grid of the backend contract."""

from dataclasses import replace

import pytest
import torch

from attention.backends.flash_attention import (
    DeterministicFlashAttentionBackend,
    FlashAttentionBackend,
)
from attention.backends.flash_attention_fp8 import Fp8FlashAttentionBackend
from attention.features import Feature
from tests.gpu.attention.device_cases import (
    BF16_TOLERANCE,
    DECODE,
    EXTEND,
    FP8_TOLERANCE,
    FRESH,
    LAYERS,
    MIXED,
    STEPS,
    device_case,
    device_spec,
    error_of,
    fp8_twin,
    oracle,
)
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.proofs.cells import proves
from tests.unit.attention.cases import PAGE_SIZES, RowSpec, relative_error, rows_of

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

FP8_STEPS = {"decode": DECODE, "mixed": MIXED, "fresh": FRESH}


@proves("fa3")
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_every_kind_of_layer_at_every_page_size(rows, layer, page_size):
    spec = device_spec(rows, layer=layer, page_size=page_size, layout_seed=page_size)
    assert error_of(device_case(spec), FlashAttentionBackend) < BF16_TOLERANCE


@proves("fa3")
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 4, 8])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_every_gqa_ratio_and_head_dim(rows, group, head_dim):
    spec = device_spec(
        rows, page_size=64, kv_heads=8 // group, head_dim=head_dim, v_head_dim=head_dim
    )
    assert error_of(device_case(spec), FlashAttentionBackend) < BF16_TOLERANCE


@pytest.mark.parametrize("page_size", [24, 128])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_float16_and_an_odd_page_size(rows, page_size):
    spec = device_spec(rows, page_size=page_size, dtype=torch.float16, kv_dtype=torch.float16)
    assert error_of(device_case(spec), FlashAttentionBackend) < BF16_TOLERANCE


@pytest.mark.parametrize("page_size", [1, 128])
def test_long_rows_of_llama_3_8b_heads(page_size):
    rows = rows_of((8000, 1), (5, 1), (4095, 1), (6000, 700), (0, 2048), (1, 1))
    spec = device_spec(rows, page_size=page_size, q_heads=32, kv_heads=8)
    assert error_of(device_case(spec), FlashAttentionBackend) < BF16_TOLERANCE
    decode = device_spec(rows_of((8000, 1), (5, 1), (4095, 1)), page_size=page_size, q_heads=32)
    assert error_of(device_case(decode), FlashAttentionBackend) < BF16_TOLERANCE


def test_more_rows_than_a_scheduling_block_holds():
    rows = tuple(RowSpec(17 * (i % 29), 1, i % 7) for i in range(1100))
    spec = device_spec(rows, page_size=16, q_heads=4, kv_heads=1, head_dim=64, v_head_dim=64)
    assert error_of(device_case(spec), FlashAttentionBackend) < BF16_TOLERANCE


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("layer", [LAYERS["plain"], LAYERS["everything"]], ids=["plain", "all"])
def test_strided_slices_of_a_fused_projection_give_the_same(rows, layer):
    case = device_case(device_spec(rows, layer=layer))
    fused = torch.cat([case.q.flatten(1), case.k.flatten(1), case.v.flatten(1)], dim=1)
    widths = [tensor[0].numel() for tensor in (case.q, case.k, case.v)]
    parts = fused.split(widths, dim=1)
    q, k, v = (
        part.unflatten(1, tensor.shape[1:])
        for part, tensor in zip(parts, (case.q, case.k, case.v), strict=True)
    )
    expected = case.run(FlashAttentionBackend)
    backend = FlashAttentionBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.init_forward_metadata(case.batch)
    assert torch.equal(backend.forward(q, k, v, case.layer, case.batch), expected)


@pytest.mark.parametrize("page_size", [1, 128])
def test_keys_saved_by_somebody_else_are_read_from_the_pool(page_size):
    case = device_case(device_spec(FRESH, page_size=page_size))
    expected = case.run(FlashAttentionBackend)
    backend = FlashAttentionBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.init_forward_metadata(case.batch)
    nothing = torch.full_like(case.k, torch.nan)
    out = backend.forward(case.q, nothing, nothing, case.layer, case.batch, save_kv_cache=False)
    assert relative_error(out, oracle(case)) < BF16_TOLERANCE
    assert relative_error(out, expected) < BF16_TOLERANCE


def test_padding_rows_without_keys_give_zeros():
    case = device_case(device_spec(DECODE))
    lengths = case.batch.seq_lens_cpu.copy()
    lengths[[0, 4]] = 0
    batch = replace(case.batch, seq_lens_cpu=lengths, seq_lens=torch.from_numpy(lengths).cuda())
    out = replace(case, batch=batch).run(FlashAttentionBackend)
    assert not out[[0, 4]].any()
    kept = [i for i in range(len(DECODE)) if i not in (0, 4)]
    assert relative_error(out[kept], oracle(case)[kept]) < BF16_TOLERANCE


def test_idle_batch_gives_an_empty_result():
    assert device_case(device_spec(())).run(FlashAttentionBackend).shape == (0, 8, 128)


@proves("fa3_deterministic")
@pytest.mark.parametrize("rows", [DECODE, EXTEND], ids=["decode", "extend"])
def test_deterministic_rows_keep_their_bits_in_any_company(rows):
    together = device_case(device_spec(rows))
    outs = together.by_row(together.run(DeterministicFlashAttentionBackend))
    assert error_of(together, DeterministicFlashAttentionBackend) < BF16_TOLERANCE
    for row, out in zip(rows, outs, strict=True):
        alone = device_case(device_spec((row,))).run(DeterministicFlashAttentionBackend)
        assert torch.equal(out, alone)


@proves("fa3_fp8", Feature.FP8_KV)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layer", [LAYERS["plain"], LAYERS["everything"]], ids=["plain", "all"])
@pytest.mark.parametrize("rows", FP8_STEPS.values(), ids=FP8_STEPS.keys())
def test_fp8_cache_agrees_with_exact_values(rows, layer, page_size):
    case = device_case(device_spec(rows, layer=layer, page_size=page_size))
    out = fp8_twin(case, 0.02, 0.03).run(Fp8FlashAttentionBackend)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, oracle(case)) < FP8_TOLERANCE


@proves("fa3_fp8", Feature.FP8_KV)
@pytest.mark.parametrize("head_dim", [32, 64, 256])
@pytest.mark.parametrize("group", [1, 8])
def test_fp8_cache_for_other_heads(group, head_dim):
    spec = device_spec(MIXED, kv_heads=8 // group, head_dim=head_dim, v_head_dim=head_dim)
    case = device_case(spec)
    out = fp8_twin(case, 1.0, 1.0).run(Fp8FlashAttentionBackend)
    assert relative_error(out, oracle(case)) < FP8_TOLERANCE
