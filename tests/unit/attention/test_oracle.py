"""The oracle itself, against torch's own attention and against hand-made cases."""

import pytest
import torch
from torch.nn import functional

from attention.oracle import attend_one_head
from tests.unit.attention.cases import CaseSpec, build_case, relative_error, rows_of


def test_whole_prompt_equals_torch_causal_attention():
    case = build_case(CaseSpec(rows_of((0, 37))))
    expected = functional.scaled_dot_product_attention(
        case.q.transpose(0, 1).double(),
        case.k.transpose(0, 1).double(),
        case.v.transpose(0, 1).double(),
        is_causal=True,
        enable_gqa=True,
    )
    assert relative_error(case.run_oracle(), expected.transpose(0, 1)) < 1e-14


def test_a_window_of_one_returns_the_tokens_own_value():
    q, k, v = torch.randn(3, 4), torch.randn(5, 4), torch.randn(5, 2)
    out = attend_one_head(q, k, v, 1.0, window=1)
    assert torch.equal(out, v[2:].double())


def test_a_dominant_sink_takes_all_the_weight():
    q, k, v = torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 3)
    assert attend_one_head(q, k, v, 1.0, sink=1e4).abs().max() == 0.0
    without = attend_one_head(q, k, v, 1.0)
    assert torch.allclose(attend_one_head(q, k, v, 1.0, sink=-1e4), without)


def test_a_tiny_cap_makes_all_visible_keys_equal():
    q, k, v = torch.randn(1, 4), torch.randn(6, 4), torch.randn(6, 3)
    out = attend_one_head(q, k, v, 1.0, logit_cap=1e-9)
    assert torch.allclose(out, v.double().mean(dim=0, keepdim=True))


def test_result_is_float64_whatever_the_inputs():
    case = build_case(CaseSpec(rows_of((4, 2)), dtype=torch.bfloat16, kv_dtype=torch.bfloat16))
    assert case.run_oracle().dtype == torch.float64


@pytest.mark.parametrize("page_size", [1, 256])
def test_foreign_memory_is_never_read(page_size):
    case = build_case(CaseSpec(rows_of((9, 3), (0, 1)), page_size=page_size))
    k, v = case.token_to_kv_pool.get_kv_buffer(0)
    assert k.isnan().any()
    assert v.isnan().any()
    assert not case.run_oracle().isnan().any()
