"""The fa4 backend: what it hands the package's function, and what it refuses."""

import logging
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends import flash_attention_4
from attention.backends.flash_attention_4 import FlashAttention4Backend
from attention.capability import AttentionBackendError
from attention.kernels import providers
from attention.kernels.providers import FlashAttention4
from attention.preferences import DeviceFacts
from attention.selection import AttentionNeeds, select_attention_backend
from tests.fakes.flash_attention import fake_triton_kernels
from tests.fakes.flash_attention_4 import flash_attn_varlen_func
from tests.unit.attention.account_cases import windowed, with_account
from tests.unit.attention.cases import CaseSpec, build_case, relative_error, rows_of

TOLERANCE = 1e-2
STEPS = {
    "decode": rows_of((0, 1), (1, 1), (15, 1), (16, 1), (300, 1)),
    "extend": rows_of((0, 5), (7, 130), (128, 2), (33, 16)),
    "mixed": rows_of((40, 1), (0, 200), (255, 1), (17, 9), (0, 1)),
}
LAYERS = {
    "plain": LayerAttentionConfig(),
    "window": LayerAttentionConfig(sliding_window_size=24),
    "window_of_one": LayerAttentionConfig(sliding_window_size=1),
    "all": LayerAttentionConfig(sliding_window_size=100, logit_cap=1.5, has_sinks=True),
}
HALF = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
BF16 = AttentionNeeds(torch.bfloat16, torch.bfloat16)
HOPPER = DeviceFacts("cuda", "H200", (9, 0))


@pytest.fixture(autouse=True)
def fake_kernels(monkeypatch):
    monkeypatch.setattr(
        flash_attention_4, "load_flash_attention_4", lambda: FlashAttention4(flash_attn_varlen_func)
    )
    monkeypatch.setattr(flash_attention_4, "load_triton_kernels", fake_triton_kernels)


def finite(case):
    for buffer in case.token_to_kv_pool.get_kv_buffer(0):
        buffer.nan_to_num_(nan=1e4)
    return case


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("page_size", [1, 128])
def test_arguments_mean_what_the_oracle_computes(rows, layer, page_size):
    case = finite(build_case(CaseSpec(rows, page_size, layer=layer, **HALF)))
    assert relative_error(case.run(FlashAttention4Backend), case.run_oracle()) < TOLERANCE


def test_pages_that_were_given_back_are_in_no_output():
    for rows in STEPS.values():
        case = windowed(rows, LAYERS["window"], 16)
        own = with_account(case)
        for buffer in own.token_to_kv_pool.get_kv_buffer(0):
            buffer.nan_to_num_(nan=1e4)
        assert relative_error(own.run(FlashAttention4Backend), case.run_oracle()) < TOLERANCE


def test_kernels_of_every_kind_of_layer_are_compiled_when_it_is_built(monkeypatch, caplog):
    calls = []

    def counted(q, k, v, **named):
        calls.append((named["max_seqlen_q"], named["window_size"], named["softcap"]))
        return flash_attn_varlen_func(q, k, v, **named)

    monkeypatch.setattr(
        flash_attention_4, "load_flash_attention_4", lambda: FlashAttention4(counted)
    )
    case = finite(build_case(CaseSpec(rows_of((3, 1)), **HALF)))
    layers = (LAYERS["plain"], LAYERS["window"], LAYERS["window_of_one"], LAYERS["plain"])
    config = replace(case.config, num_layers=4, layers=layers)
    with caplog.at_level(logging.INFO, logger="attention.backends.flash_attention_4"):
        FlashAttention4Backend(config, case.req_to_token_pool, case.token_to_kv_pool)
    assert {(queries, left is None) for queries, (left, _), _ in calls} == {
        (queries, is_plain) for queries in (1, 1024) for is_plain in (True, False)
    }
    assert len(calls) == 4
    assert "kernels of 2 kinds of layers ready after" in caplog.text


def test_idle_batches_give_an_empty_result():
    case = build_case(CaseSpec((), **HALF))
    assert finite(case).run(FlashAttention4Backend).shape == (0, 8, 32)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"kv_dtype": torch.float16}, "model's dtype torch.bfloat16, not torch.float16; fa3_fp8"),
        ({"head_dim": 256}, r"up to 128 in a paged cache, this model has \(256, 32\); fa3 and"),
        ({"v_head_dim": 72}, r"multiple of 16 elements up to 128 .* this model has \(32, 72\)"),
    ],
)
def test_what_no_kernel_covers_is_refused_with_a_remedy(changes, why):
    case = build_case(CaseSpec(rows_of((3, 1)), **(HALF | changes)))
    with pytest.raises(AttentionBackendError, match=why):
        FlashAttention4Backend(case.config, case.req_to_token_pool, case.token_to_kv_pool)


@pytest.mark.parametrize(
    ("device", "why"),
    [
        (DeviceFacts("cuda", "A100", (8, 0)), "needs sm90 or newer, this is A100"),
        (DeviceFacts("cuda", "RTX 5090", (12, 0)), "has no kernels beyond sm103, this is RTX"),
        (DeviceFacts("cpu", "CPU", None), "runs on cuda, not on CPU"),
    ],
)
def test_asking_for_it_on_another_device_names_the_reason(device, why):
    with pytest.raises(AttentionBackendError, match=f"'fa4' was asked for but {why}"):
        select_attention_backend("fa4", device, BF16)


def package(monkeypatch, **functions):
    module = ModuleType("flash_attn.cute")
    for name, function in functions.items():
        setattr(module, name, function)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)


def test_asking_for_it_without_its_package_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(AttentionBackendError, match=r"pip install 'flash-attn-4\[cu13\]==4"):
        select_attention_backend("fa4", HOPPER, BF16)


def test_a_package_with_other_arguments_is_refused_by_their_names(monkeypatch):
    package(monkeypatch, flash_attn_varlen_func=lambda q, k, v, page_table=None: q)
    probe = providers.probe_flash_attention_4()
    assert not probe.is_available
    assert "has no causal, cu_seqlens_q, learnable_sink" in probe.missing
    package(monkeypatch, flash_attn_varlen_func=flash_attn_varlen_func)
    assert providers.load_flash_attention_4().attend is flash_attn_varlen_func
