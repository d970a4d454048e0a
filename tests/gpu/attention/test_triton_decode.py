"""The Triton decode kernel on the device against float64, with NaN wherever nobody wrote."""

import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends.flash_attention_triton import TritonDecodeFlashAttentionBackend
from tests.gpu.attention.device_cases import (
    BF16_TOLERANCE,
    DECODE,
    LAYERS_AND_PAGES,
    device_spec,
    error_of,
)
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.unit.attention.cases import RowSpec, build_case, rows_of

pytestmark = [*NEEDS_GPU, NEEDS_FA3]


@pytest.mark.parametrize(("layer", "page_size"), LAYERS_AND_PAGES)
def test_every_kind_of_layer_at_every_page_size(layer, page_size):
    case = build_case(device_spec(DECODE, layer=layer, page_size=page_size, layout_seed=page_size))
    assert error_of(case, TritonDecodeFlashAttentionBackend) < BF16_TOLERANCE


@pytest.mark.parametrize(
    ("head_dim", "q_heads", "kv_heads"),
    [
        *[(head_dim, 8, kv_heads) for head_dim in (32, 64, 96, 128, 256) for kv_heads in (8, 1)],
        *[(head_dim, 14, 2) for head_dim in (32, 64, 256)],
        *[(head_dim, 64, 2) for head_dim in (96, 128, 256)],
    ],
)
def test_every_gqa_ratio_and_head_dim(head_dim, q_heads, kv_heads):
    spec = device_spec(
        DECODE, q_heads=q_heads, kv_heads=kv_heads, head_dim=head_dim, v_head_dim=head_dim
    )
    assert error_of(build_case(spec), TritonDecodeFlashAttentionBackend) < BF16_TOLERANCE


@pytest.mark.parametrize("window", [-1, 64, 1000])
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_unlike_rows_are_cut_and_joined(page_size, window):
    layer = LayerAttentionConfig(sliding_window_size=window, has_sinks=True)
    rows = rows_of((20000, 1), (5, 1), (4095, 1), (0, 1), (127, 1), (128, 1), (9000, 1))
    spec = device_spec(rows, page_size=page_size, q_heads=32, kv_heads=8, layer=layer)
    assert error_of(build_case(spec), TritonDecodeFlashAttentionBackend) < BF16_TOLERANCE


def test_more_rows_than_a_graph_ever_has():
    rows = tuple(RowSpec(17 * (i % 29), 1, i % 7) for i in range(1100))
    spec = device_spec(rows, q_heads=4, kv_heads=1, head_dim=64, v_head_dim=64)
    assert error_of(build_case(spec), TritonDecodeFlashAttentionBackend) < BF16_TOLERANCE


def test_float16():
    spec = device_spec(DECODE, dtype=torch.float16, kv_dtype=torch.float16)
    assert error_of(build_case(spec), TritonDecodeFlashAttentionBackend) < BF16_TOLERANCE


def test_joining_gives_the_same_bits_every_time():
    case = build_case(device_spec(rows_of((9000, 1), (3, 1), (2500, 1)), q_heads=32, kv_heads=8))
    first = case.run(TritonDecodeFlashAttentionBackend)
    for _ in range(50):
        assert torch.equal(case.run(TritonDecodeFlashAttentionBackend), first)
