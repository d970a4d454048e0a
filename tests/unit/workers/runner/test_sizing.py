"""What a loaded model's geometry asks of a backend, and which one a Hopper GPU then gets."""

from types import SimpleNamespace

import pytest
import torch

from attention.backends.flash_attention import FlashAttentionBackend
from attention.capability import AttentionBackendError, BackendProbe
from attention.config import LayerAttentionConfig
from attention.selection import DeviceFacts
from workers.config import EngineConfig
from workers.models.base import AttentionGeometry
from workers.runner.sizing import plan_attention


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    facts = DeviceFacts("cuda", "NVIDIA H200", (9, 0))
    monkeypatch.setattr("workers.runner.sizing.detect_device", lambda device: facts)
    probe = classmethod(lambda cls: BackendProbe(True))
    monkeypatch.setattr(FlashAttentionBackend, "probe", probe)


def loaded_model(v_head_dim):
    geometry = AttentionGeometry(8, 2, 64, v_head_dim, (LayerAttentionConfig(),) * 2)
    dtype, device = torch.bfloat16, torch.device("cpu")

    def attention_config(page_size, kv_dtype):
        return geometry.attention_config(256, page_size, dtype, kv_dtype, device)

    return SimpleNamespace(
        model=SimpleNamespace(geometry=geometry),
        dtype=dtype,
        device=device,
        attention_config=attention_config,
    )


def plan(v_head_dim, **changes):
    config = EngineConfig(model="m", num_pages=4, **changes)
    return plan_attention(config, loaded_model(v_head_dim))


@pytest.mark.parametrize(("v_head_dim", "expected"), [(64, "fa3_triton"), (32, "fa3")])
def test_hopper_decodes_by_triton_where_k_and_v_heads_are_of_one_size(v_head_dim, expected):
    assert plan(v_head_dim).backend_name == expected


def test_an_fp8_cache_gets_its_own_backend():
    assert plan(64, kv_cache_dtype="fp8_e4m3").backend_name == "fa3_fp8"


def test_triton_decode_asked_for_with_unequal_heads_is_an_error_before_anything_is_allocated():
    with pytest.raises(AttentionBackendError, match="V heads of another size than K heads"):
        plan(32, attention_backend="fa3_triton")
