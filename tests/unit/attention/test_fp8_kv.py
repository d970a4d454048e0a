"""The FP8 KV cache in plain torch: its pool, its backend and how it is chosen."""

from dataclasses import replace

import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends.flash_attention_fp8 import Fp8FlashAttentionBackend
from attention.backends.torch_native import TorchNativeBackend
from attention.backends.torch_native_fp8 import Fp8TorchNativeBackend
from attention.backends.triton_paged import TritonBackend
from attention.capability import AttentionBackendError, BackendProbe
from attention.features import Feature
from attention.memory.cuda_kv_pool import create_mha_pool
from attention.memory.fp8_kv_pool import E4M3_MAX, Fp8MHATokenToKVPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from attention.preferences import DeviceFacts
from attention.selection import AttentionNeeds, select_attention_backend
from tests.proofs.cells import proves
from tests.unit.attention.cases import PAGE_SIZES, CaseSpec, build_case, relative_error, rows_of
from tests.unit.attention.visibility_cases import KINDS, build_visible

FP8 = torch.float8_e4m3fn
FP8_TOLERANCE = 6e-2
SCALES = (0.01, 0.02)
CPU = DeviceFacts("cpu", "CPU", None)
HOPPER = DeviceFacts("cuda", "H200", (9, 0))

DECODE = rows_of((0, 1), (1, 1), (17, 1), (300, 1), (64, 1))
EXTEND = rows_of((0, 5), (7, 130), (33, 16))
MIXED = rows_of((40, 1), (0, 300), (255, 1), (17, 9), (0, 1))
STEPS = {"decode": DECODE, "extend": EXTEND, "mixed": MIXED}
LAYERS = {
    "plain": LayerAttentionConfig(),
    "window": LayerAttentionConfig(sliding_window_size=24),
    "chunks": LayerAttentionConfig(chunk_size=24),
    "everything": LayerAttentionConfig(sliding_window_size=100, logit_cap=1.5, has_sinks=True),
}


def fp8_twin(case, k_scale=1.0, v_scale=1.0):
    """The case over an fp8 pool that holds what the case's pool holds."""
    config = replace(case.config, kv_dtype=FP8)
    pool = Fp8MHATokenToKVPool(config, case.token_to_kv_pool.num_pages)
    pool.set_scales(0, k_scale, v_scale)
    everywhere = torch.arange(pool.num_pages * pool.page_size)
    k, v = (buffer.flatten(0, 1) for buffer in case.token_to_kv_pool.get_kv_buffer(0))
    pool.set_kv_buffer(0, everywhere, k, v)
    return replace(case, config=config, token_to_kv_pool=pool)


def make_pool(num_layers=1, num_pages=3):
    case = build_case(CaseSpec(rows_of((0, 1)), kv_heads=2))
    layers = (LayerAttentionConfig(),) * num_layers
    config = replace(case.config, kv_dtype=FP8, num_layers=num_layers, layers=layers)
    return Fp8MHATokenToKVPool(config, num_pages)


@proves("torch_native_fp8", Feature.FP8_KV)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_fp8_cache_agrees_with_the_oracle_over_exact_values(rows, layer, dtype):
    case = build_case(CaseSpec(rows, dtype=dtype, kv_dtype=dtype, layer=layer))
    out = fp8_twin(case, *SCALES).run(Fp8TorchNativeBackend)
    assert out.dtype == dtype
    assert relative_error(out, case.run_oracle()) < FP8_TOLERANCE


@proves("torch_native_fp8", Feature.FP8_KV)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("group", [1, 4])
def test_every_page_size_and_group_agrees_with_the_oracle(page_size, group):
    spec = CaseSpec(MIXED, page_size=page_size, q_heads=8, kv_heads=8 // group)
    case = build_case(spec)
    assert relative_error(fp8_twin(case).run(Fp8TorchNativeBackend), case.run_oracle()) < 6e-2


@proves("torch_native_fp8", Feature.FP8_KV, Feature.UNEQUAL_HEAD_DIMS)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_v_heads_of_another_size(rows):
    case = build_case(CaseSpec(rows, v_head_dim=16))
    out = fp8_twin(case, *SCALES).run(Fp8TorchNativeBackend)
    assert relative_error(out, case.run_oracle()) < FP8_TOLERANCE


@proves("torch_native_fp8", Feature.FP8_KV)
@pytest.mark.parametrize("layer", [LAYERS["plain"], LayerAttentionConfig(chunk_size=24)], ids=str)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_visibility(make, layer):
    case = build_visible(CaseSpec(EXTEND, layer=layer), make)
    out = fp8_twin(case, *SCALES).run(Fp8TorchNativeBackend)
    assert relative_error(out, case.run_oracle()) < FP8_TOLERANCE


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_nothing_is_lost_but_the_rounding_of_the_cache(rows):
    """Over values that e4m3 holds exactly, the result is torch_native's over the same values."""
    case = build_case(CaseSpec(rows))
    twin = fp8_twin(case, *SCALES)
    exact = build_case(case.spec)
    tokens = torch.arange(exact.token_to_kv_pool.num_pages * exact.spec.page_size)
    rounded = twin.token_to_kv_pool.gather_tokens(0, tokens)
    exact.token_to_kv_pool.set_kv_buffer(0, tokens, *rounded)
    new = twin.batch.out_cache_loc
    twin.token_to_kv_pool.set_kv_buffer(0, new, case.k, case.v)
    k, v = twin.token_to_kv_pool.gather_tokens(0, new)
    exact = replace(exact, k=k, v=v)
    error = relative_error(twin.run(Fp8TorchNativeBackend), exact.run(TorchNativeBackend))
    assert error < 1e-5


def test_values_come_back_scaled_and_saturated():
    pool = make_pool(num_layers=2)
    pool.set_scales(1, 0.5, 0.25)
    case = build_case(CaseSpec(rows_of((0, 1)), kv_heads=2))
    k, v = torch.full_like(case.k, 3.0), torch.full_like(case.v, -1e6)
    for layer_id in (0, 1):
        pool.set_kv_buffer(layer_id, torch.tensor([7]), k, v)
    for layer_id, v_scale in ((0, 1.0), (1, 0.25)):
        got_k, got_v = pool.gather_tokens(layer_id, torch.tensor([7]))
        assert torch.equal(got_k, k)
        assert torch.equal(got_v, torch.full_like(got_v, -E4M3_MAX * v_scale))
    heads = pool.gather_heads(1, torch.tensor([7 * 2 + 1], dtype=torch.int32))
    assert torch.equal(heads[0], k[:, 1])


def test_a_page_is_half_of_bfloat16():
    pool = make_pool()
    config = build_case(CaseSpec(rows_of((0, 1)), kv_heads=2)).config
    half = MHATokenToKVPool.bytes_per_page(replace(config, kv_dtype=torch.bfloat16))
    fp8 = MHATokenToKVPool.bytes_per_page(replace(config, kv_dtype=FP8))
    assert 2 * fp8 == half
    assert pool.num_bytes == 3 * fp8


@pytest.mark.parametrize("scales", [(0.0, 1.0), (1.0, -1.0)])
def test_scales_are_positive(scales):
    with pytest.raises(ValueError, match="positive"):
        make_pool().set_scales(0, *scales)


def test_the_pool_and_the_backend_want_each_other():
    case = build_case(CaseSpec(DECODE))
    with pytest.raises(AttentionBackendError, match="not MHATokenToKVPool"):
        case.run(Fp8TorchNativeBackend)
    with pytest.raises(AttentionBackendError, match="not torch.float32"):
        Fp8MHATokenToKVPool(case.config, 4)
    config = replace(case.config, kv_dtype=FP8)
    assert type(create_mha_pool(config, 4)) is Fp8MHATokenToKVPool


def test_an_fp8_cache_is_served_on_the_cpu_by_its_own_backend():
    needs = AttentionNeeds(torch.float32, FP8)
    choice = select_attention_backend(None, CPU, needs)
    assert choice.name == "torch_native_fp8"
    ((rejected, why),) = choice.rejected
    assert rejected == "torch_native"
    assert "does not read a KV cache in torch.float8_e4m3fn" in why


@pytest.mark.parametrize(
    ("probe", "expected"),
    [(BackendProbe(True), "fa3_fp8"), (BackendProbe(False, "sgl_kernel"), "triton_fp8")],
)
def test_hopper_takes_the_fp8_kernel_and_says_when_it_is_not_there(monkeypatch, probe, expected):
    monkeypatch.setattr(Fp8FlashAttentionBackend, "probe", classmethod(lambda cls: probe))
    monkeypatch.setattr(TritonBackend, "probe", classmethod(lambda cls: BackendProbe(True)))
    needs = AttentionNeeds(torch.bfloat16, FP8, needs_sliding_window=True, needs_sinks=True)
    choice = select_attention_backend(None, HOPPER, needs)
    assert choice.name == expected
    assert probe.missing in str(choice)


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("torch_native", "does not read a KV cache in torch.float8_e4m3fn"),
        ("fa3_fp8", "runs on cuda, not on CPU"),
    ],
)
def test_a_backend_without_fp8_is_an_error_that_says_so(backend, why):
    needs = AttentionNeeds(torch.bfloat16, FP8)
    with pytest.raises(AttentionBackendError, match=why):
        select_attention_backend(backend, CPU, needs)
