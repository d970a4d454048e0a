"""Which steps of fa3 settle their splits once, and of what; the kernels are fakes."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from attention import ForwardMode, LayerAttentionConfig
from attention.backends import flash_attention, triton_decoder
from attention.backends.flash_attention import (
    DeterministicFlashAttentionBackend,
    FlashAttentionBackend,
)
from attention.backends.flash_attention_chunks import ChunkedFlashAttentionBackend
from attention.backends.flash_attention_fp8 import Fp8FlashAttentionBackend
from attention.backends.flash_attention_triton import TritonDecodeFlashAttentionBackend
from attention.kernels.providers import FlashAttention3
from attention.memory import cuda_kv_pool
from attention.memory.cuda_kv_pool import CudaFp8MHATokenToKVPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from tests.fakes.flash_attention import (
    FakePagedDecode,
    fake_flash_attention_3,
    fake_triton_kernels,
)
from tests.unit.attention.cases import CaseSpec, build_case, relative_error, rows_of

BF16_TOLERANCE = 1e-2
PLAIN = LayerAttentionConfig()
WINDOW = LayerAttentionConfig(sliding_window_size=24)
CHAINS = rows_of((7, 4), (100, 4), (0, 4), (33, 4))
"""Steps that verify three drafts a row."""
UNEVEN = rows_of((7, 4), (100, 4), (0, 3), (33, 4))


@dataclass(frozen=True)
class Calls:
    """plans: arguments of each and its result. schedules: what each attend was given."""

    plans: list[tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]] = field(default_factory=list)
    schedules: list[torch.Tensor | None] = field(default_factory=list)

    def of(self, kernels: FlashAttention3) -> FlashAttention3:
        return replace(
            kernels, plan=self._planning(kernels.plan), attend=self._attending(kernels.attend)
        )

    def _planning(self, plan: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def own(*shape: Any, **arguments: Any) -> torch.Tensor:
            made = plan(*shape, **arguments)
            self.plans.append((shape, arguments, made))
            return made

        return own

    def _attending(self, attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def own(*tensors: Any, **arguments: Any) -> torch.Tensor:
            self.schedules.append(arguments["scheduler_metadata"])
            return attend(*tensors, **arguments)

        return own


@pytest.fixture
def calls(monkeypatch):
    own = Calls()
    kernels = own.of(fake_flash_attention_3())
    monkeypatch.setattr(flash_attention, "load_flash_attention_3", lambda: kernels)
    monkeypatch.setattr(flash_attention, "load_triton_kernels", fake_triton_kernels)
    monkeypatch.setattr(cuda_kv_pool, "load_triton_kernels", fake_triton_kernels)
    return own


def run_step(
    rows, backend_class, layers, is_captured=True, is_fp8=False, mode=ForwardMode.TARGET_VERIFY
):
    """All layers of a step, each over the same new tokens; the outputs by layer."""
    spec = CaseSpec(rows, dtype=torch.bfloat16, kv_dtype=torch.bfloat16)
    case = build_case(spec)
    config = replace(case.config, num_layers=len(layers), layers=layers)
    pool_class = MHATokenToKVPool
    if is_fp8:
        config = replace(config, kv_dtype=torch.float8_e4m3fn)
        pool_class = CudaFp8MHATokenToKVPool
    pool = pool_class(config, case.token_to_kv_pool.num_pages)
    everywhere = torch.arange(pool.num_pages * pool.page_size)
    k, v = (own.flatten(0, 1).nan_to_num() for own in case.token_to_kv_pool.get_kv_buffer(0))
    backend = backend_class(config, case.req_to_token_pool, pool)
    batch = replace(
        case.batch,
        forward_mode=mode,
        attn_backend=backend,
        is_captured=is_captured,
    )
    if is_captured:
        backend.init_cuda_graph_state(len(rows) + 2)
        backend.init_forward_metadata_capture_cuda_graph(batch)
        backend.record_step_tables(batch)
    else:
        backend.init_forward_metadata(batch)
    outputs = []
    for layer_id, layer in enumerate(layers):
        pool.set_kv_buffer(layer_id, everywhere, k, v)
        case.layer.layer_id = layer_id
        case.layer.sliding_window_size = layer.sliding_window_size
        outputs.append(backend.forward(case.q, case.k, case.v, case.layer, batch))
    return outputs


def test_a_verify_graph_plans_once_for_all_layers_of_a_kind(calls):
    outputs = run_step(CHAINS, FlashAttentionBackend, (PLAIN, WINDOW, PLAIN, WINDOW))
    plain, window = (plan for _, _, plan in calls.plans)
    assert [id(own) for own in calls.schedules] == [id(own) for own in (plain, window) * 2]
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])


@pytest.mark.parametrize("layer", [PLAIN, WINDOW], ids=["plain", "window"])
def test_a_plan_is_made_of_what_its_layers_are_called_with(calls, layer):
    (out,) = run_step(CHAINS, FlashAttentionBackend, (layer,))
    ((shape, arguments, made),) = calls.plans
    rows, max_queries, max_keys, heads, kv_heads, head_dim, lengths = shape
    case = build_case(CaseSpec(CHAINS, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, layer=layer))
    assert (rows, max_queries, heads, kv_heads, head_dim) == (4, 4, 8, 4, 32)
    assert max_keys == -(-case.config.max_context_len // 16) * 16
    assert lengths.tolist() == made.tolist() == [11, 104, 4, 37]
    assert arguments["cu_seqlens_q"].tolist() == [0, 4, 8, 12, 16]
    named = ("qkv_dtype", "causal", "window_size", "has_softcap", "num_splits", "page_size")
    wanted_window = (23, 0) if layer is WINDOW else (-1, -1)
    assert [arguments[name] for name in named] == [
        torch.bfloat16, True, wanted_window, False, 0, 16,
    ]  # fmt: skip
    assert relative_error(out, case.run_oracle()) < BF16_TOLERANCE


def test_an_e4m3_cache_is_planned_as_one(calls):
    run_step(CHAINS, Fp8FlashAttentionBackend, (PLAIN, PLAIN), is_fp8=True)
    ((_, arguments, made),) = calls.plans
    assert arguments["qkv_dtype"] == torch.float8_e4m3fn
    assert [own is made for own in calls.schedules] == [True, True]


def test_steps_outside_of_graphs_leave_it_to_every_call(calls):
    """Where the kernel does not split, a plan costs the host more than it saves the device."""
    run_step(CHAINS, FlashAttentionBackend, (PLAIN, PLAIN), is_captured=False)
    assert (calls.plans, calls.schedules) == ([], [None, None])


@pytest.mark.parametrize("rows", [UNEVEN, rows_of((3, 0), (9, 4))], ids=["uneven", "empty_row"])
def test_rows_of_unlike_lengths_leave_it_to_every_call(calls, rows):
    """The kernel counts tokens, a plan counts rows of the longest one's."""
    run_step(rows, FlashAttentionBackend, (PLAIN, PLAIN))
    assert (calls.plans, calls.schedules) == ([], [None, None])


def test_a_plan_is_of_one_step(calls):
    for rows in (CHAINS, UNEVEN):
        run_step(rows, FlashAttentionBackend, (PLAIN,))
    ((*_, made),) = calls.plans
    assert [own is made for own in calls.schedules] == [True, False]


@pytest.mark.parametrize(("mode", "num_plans"), [("DECODE", 2), ("TARGET_VERIFY", 0)])
def test_only_decode_graphs_plan_for_the_triton_kernel(calls, monkeypatch, mode, num_plans):
    """One plan a window."""
    planned = []

    class CountedDecode(FakePagedDecode):
        def plan(self, cache_seqlens, sliding_window_size):
            planned.append(sliding_window_size)
            return super().plan(cache_seqlens, sliding_window_size)

    monkeypatch.setattr(triton_decoder, "PagedDecode", CountedDecode)
    rows = rows_of((7, 1), (100, 1)) if mode == "DECODE" else CHAINS
    layers = (PLAIN, WINDOW, PLAIN)
    run_step(rows, TritonDecodeFlashAttentionBackend, layers, mode=ForwardMode[mode])
    assert len(planned) == num_plans
    assert len(calls.plans) == 2 - num_plans


def test_the_deterministic_variation_plans_nothing(calls):
    run_step(CHAINS, DeterministicFlashAttentionBackend, (PLAIN, PLAIN))
    assert (calls.plans, calls.schedules) == ([], [None, None])


def test_layers_with_chunks_plan_nothing(calls):
    chunked = LayerAttentionConfig(chunk_size=64)
    case = build_case(
        CaseSpec(CHAINS, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, layer=chunked)
    )
    assert relative_error(case.run(ChunkedFlashAttentionBackend), case.run_oracle()) < 1e-2
    assert (calls.plans, calls.schedules) == ([], [None])
