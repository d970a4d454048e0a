"""What a loaded model's geometry asks of a backend, and which one a Hopper GPU then gets."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from attention import LatentEntry
from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.flex import FlexAttentionBackend
from attention.capability import AttentionBackendError, BackendProbe
from attention.config import AttentionHeads, LayerAttentionConfig
from attention.memory.slot_states import StateEntry, StateTensor
from attention.preferences import DeviceFacts
from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.models.base import AttentionGeometry
from workers.runner.sizing import plan_attention


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    facts = DeviceFacts("cuda", "NVIDIA H200", (9, 0))
    monkeypatch.setattr("workers.runner.sizing.detect_device", lambda device: facts)
    probe = classmethod(lambda cls: BackendProbe(True))
    for backend in (FlashAttentionBackend, FlexAttentionBackend):
        monkeypatch.setattr(backend, "probe", probe)


def loaded_model(v_head_dim, *layers, state_entries=()):
    layers = layers or (LayerAttentionConfig(),) * 2
    return loaded_with(AttentionGeometry(8, 2, 64, v_head_dim, layers), state_entries)


def loaded_with(geometry, state_entries=(), continues_states=True):
    dtype, device = torch.bfloat16, torch.device("cpu")

    def attention_config(page_size, kv_dtype):
        return geometry.attention_config(256, page_size, dtype, kv_dtype, device)

    return SimpleNamespace(
        model=SimpleNamespace(
            geometry=geometry, state_entries=state_entries, continues_states=continues_states
        ),
        dtype=dtype,
        device=device,
        attention_config=attention_config,
    )


def plan(v_head_dim, **changes):
    config = EngineConfig(model="m", num_pages=4, **changes)
    return plan_attention(config, loaded_model(v_head_dim))


@pytest.mark.parametrize(("v_head_dim", "expected"), [(64, "fa3_triton"), (32, "fa3")])
def test_hopper_decodes_by_triton_where_k_and_v_heads_are_of_one_size(v_head_dim, expected):
    assert str(plan(v_head_dim).routes) == expected


def test_an_fp8_cache_gets_its_own_backend():
    assert str(plan(64, kv_cache_dtype="fp8_e4m3").routes) == "fa3_fp8"


def test_triton_decode_asked_for_with_unequal_heads_is_an_error_before_anything_is_allocated():
    with pytest.raises(AttentionBackendError, match="V heads of another size than K heads"):
        plan(32, attention_backend="fa3_triton")


PLAIN = LayerAttentionConfig()
FEW_HAVE = {
    "attention in chunks": LayerAttentionConfig(chunk_size=8),
    "layers that differ in heads or head size": LayerAttentionConfig(
        heads=AttentionHeads(8, 1, 128, 128)
    ),
    "layers that read the KV cache of others": LayerAttentionConfig(kv_layer_id=0),
}


@pytest.mark.parametrize(("feature", "layer"), FEW_HAVE.items())
def test_what_few_backends_can_do_is_refused_by_the_others(feature, layer):
    loaded = loaded_model(64, PLAIN, layer)
    chosen = plan_attention(EngineConfig(model="m", num_pages=4), loaded).routes
    has_own_route = layer.chunk_size > 0
    expected = ("fa3_triton", "flex") if has_own_route else ("torch_native", "torch_native")
    assert (chosen.decode, chosen.extend) == (expected, expected)
    for backend in ("fa3", "fa3_triton"):
        asked = EngineConfig(model="m", num_pages=4, attention_backend=backend)
        with pytest.raises(AttentionBackendError, match=f"has no {feature}, which this model"):
            plan_attention(asked, loaded)


@pytest.mark.parametrize("feature", list(FEW_HAVE)[1:])
def test_an_fp8_cache_of_unlike_layers_is_refused(feature):
    config = EngineConfig(model="m", num_pages=4, kv_cache_dtype="fp8_e4m3")
    with pytest.raises(AttentionBackendError, match=f"torch_native_fp8: has no {feature}"):
        plan_attention(config, loaded_model(64, PLAIN, FEW_HAVE[feature]))


def test_v_heads_of_another_size_in_one_layer_count():
    own = LayerAttentionConfig(heads=AttentionHeads(8, 2, 64, 32))
    geometry = loaded_model(64, PLAIN, own).model.geometry
    assert geometry.has_unequal_head_dims
    assert not loaded_model(64).model.geometry.has_unequal_head_dims


def test_pages_are_as_many_as_all_layers_own_entries_allow(monkeypatch):
    """Layer 0 keeps 2 heads of 64 + 64 elements, layer 1 one of 128 + 128, layer 2 nothing."""
    monkeypatch.undo()
    wide = AttentionHeads(8, 1, 128, 128)
    loaded = loaded_model(
        64, PLAIN, replace(PLAIN, heads=wide), replace(PLAIN, heads=wide, kv_layer_id=1)
    )
    page_bytes = 16 * (256 + 256) * torch.bfloat16.itemsize
    config = EngineConfig(
        model="m", page_size=16, kv_cache_bytes=10 * page_bytes + 1, max_running_requests=4
    )
    assert plan_attention(config, loaded).pages_by_account == (10,)


def latent_model(latent_dim=512):
    """Attention of DeepSeek-V2-Lite, with two layers."""
    entry = LatentEntry(latent_dim, rope_dim=64)
    return loaded_with(AttentionGeometry(16, 16, 192, 128, (PLAIN, PLAIN), entry))


@pytest.mark.parametrize("backend", ["fa3_triton", "fa3_fp8", "torch_native_fp8"])
def test_backends_over_heads_refuse_a_model_of_latents(backend):
    is_fp8 = backend.endswith("fp8")
    config = EngineConfig(
        model="m",
        num_pages=4,
        attention_backend=backend,
        kv_cache_dtype="fp8_e4m3" if is_fp8 else "auto",
    )
    with pytest.raises(AttentionBackendError, match=f"'{backend}' was .* has no multi-head latent"):
        plan_attention(config, latent_model())
    chosen = plan_attention(EngineConfig(model="m", num_pages=4), latent_model())
    assert (str(chosen.routes), chosen.config.latent) == ("fa3", LatentEntry(512, 64))


def test_fa3_takes_latents_that_it_has_kernels_for():
    config = EngineConfig(model="m", num_pages=4, attention_backend="fa3")
    assert str(plan_attention(config, latent_model()).routes) == "fa3"
    with pytest.raises(AttentionBackendError, match="'fa3' was .* this model has 40"):
        plan_attention(config, latent_model(latent_dim=40))


def test_pages_are_as_many_as_latents_allow(monkeypatch):
    monkeypatch.undo()
    page_bytes = 16 * 2 * 576 * torch.bfloat16.itemsize
    config = EngineConfig(
        model="m", page_size=16, kv_cache_bytes=10 * page_bytes + 1, max_running_requests=4
    )
    assert plan_attention(config, latent_model()).pages_by_account == (10,)


STATE = StateEntry((StateTensor((8, 100), torch.float32), StateTensor((3,), torch.bfloat16)))


def plan_with_states(continues_states=True, **changes):
    geometry = AttentionGeometry(8, 2, 64, 64, (PLAIN, PLAIN))
    config = EngineConfig(model="m", page_size=16, **changes)
    return plan_attention(config, loaded_with(geometry, (STATE, STATE), continues_states))


@pytest.mark.parametrize("num_snapshots", [0, 7])
def test_states_of_all_slots_and_snapshots_come_off_the_memory_for_pages(num_snapshots):
    assert STATE.bytes_per_slot == 8 * 100 * 4 + 3 * 2
    bytes_per_page = 16 * 2 * 2 * 128 * 2
    left = (1 << 20) - (5 + num_snapshots) * 2 * STATE.bytes_per_slot
    sized = plan_with_states(
        max_running_requests=5, kv_cache_bytes=1 << 20, num_state_snapshots=num_snapshots
    )
    assert sized.pages_by_account == (left // bytes_per_page,)
    assert sized.num_snapshots == num_snapshots


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"max_running_requests": 5}, 16),
        ({"max_running_requests": 20}, 20),
        # 64 slots leave 58 times what one takes.
        ({"max_running_requests": 64, "kv_cache_bytes": 122 * 2 * STATE.bytes_per_slot + 9}, 29),
        ({"max_running_requests": 5, "continues_states": False}, 0),
        ({"max_running_requests": 5, "continues_states": False, "num_state_snapshots": 3}, 3),
        ({"max_running_requests": 5, "enable_prefix_cache": False}, 0),
        ({"enable_prefix_cache": False, "num_state_snapshots": 9}, 0),
    ],
)
def test_there_are_as_many_snapshots_as_slots_where_nothing_is_said(changes, expected):
    assert plan_with_states(**changes).num_snapshots == expected


def test_a_model_without_states_has_no_snapshots():
    assert plan(64, num_state_snapshots=9).num_snapshots == 0


def test_states_that_leave_no_page_are_an_error_that_says_so():
    with pytest.raises(ConfigError, match="hold no page .* for the states of 64 requests"):
        plan_with_states(max_running_requests=64, kv_cache_bytes=64 * 2 * STATE.bytes_per_slot)
