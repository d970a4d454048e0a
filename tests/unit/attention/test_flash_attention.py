"""The fa3 backends' metadata and arguments; the kernels are replaced by what they document.

What the real kernels do with them is tests/gpu/attention's to find out.
"""

from dataclasses import replace

import pytest
import torch

from attention import ForwardBatch, LayerAttentionConfig
from attention.backends import flash_attention, triton_decoder
from attention.backends.flash_attention import (
    DeterministicFlashAttentionBackend,
    FlashAttentionBackend,
)
from attention.backends.flash_attention_fp8 import Fp8FlashAttentionBackend
from attention.backends.flash_attention_metadata import kernel_window
from attention.backends.flash_attention_triton import TritonDecodeFlashAttentionBackend
from attention.capability import AttentionBackendError
from attention.memory import cuda_kv_pool
from attention.memory.cuda_kv_pool import CudaFp8MHATokenToKVPool
from attention.memory.fp8_kv_pool import Fp8MHATokenToKVPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from tests.fakes.flash_attention import (
    FakePagedDecode,
    fake_flash_attention_3,
    fake_triton_kernels,
)
from tests.fakes.qkv_projection import draw_projection, finish
from tests.unit.attention.cases import (
    PAGE_SIZES,
    AttentionCase,
    CaseSpec,
    build_case,
    relative_error,
    rows_of,
)

BACKENDS = [FlashAttentionBackend, TritonDecodeFlashAttentionBackend]
BF16_TOLERANCE = 1e-2
DEFAULT_PAGE_SIZE = CaseSpec(()).page_size
FP8_TOLERANCE = 6e-2

DECODE = rows_of((0, 1), (1, 1), (15, 1), (16, 1), (300, 1), (64, 1))
EXTEND = rows_of((0, 5), (7, 130), (128, 2), (33, 16))
MIXED = rows_of((40, 1), (0, 300), (255, 1), (17, 9), (0, 1))
FRESH = rows_of((0, 5), (0, 130), (0, 1), (0, 40))
STEPS = {"decode": DECODE, "extend": EXTEND, "mixed": MIXED, "fresh": FRESH}
LAYERS = {
    "plain": LayerAttentionConfig(),
    "window": LayerAttentionConfig(sliding_window_size=24),
    "window_of_one": LayerAttentionConfig(sliding_window_size=1),
    "cap": LayerAttentionConfig(logit_cap=0.8),
    "sinks": LayerAttentionConfig(has_sinks=True),
    "everything": LayerAttentionConfig(sliding_window_size=100, logit_cap=1.5, has_sinks=True),
}


@pytest.fixture(autouse=True)
def fake_kernels(monkeypatch):
    monkeypatch.setattr(flash_attention, "load_flash_attention_3", fake_flash_attention_3)
    monkeypatch.setattr(flash_attention, "load_triton_kernels", fake_triton_kernels)
    monkeypatch.setattr(triton_decoder, "PagedDecode", FakePagedDecode)
    monkeypatch.setattr(cuda_kv_pool, "load_triton_kernels", fake_triton_kernels)


def half(rows, **changes) -> CaseSpec:
    return CaseSpec(rows, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, **changes)


def backend_of(case: AttentionCase) -> FlashAttentionBackend:
    return FlashAttentionBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_mean_what_the_oracle_computes(rows, layer, backend):
    case = build_case(half(rows, layer=layer))
    assert relative_error(case.run(backend), case.run_oracle()) < BF16_TOLERANCE


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("page_size", [size for size in PAGE_SIZES if size != DEFAULT_PAGE_SIZE])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_page_size_in_every_step(rows, page_size, backend):
    case = build_case(half(rows, layer=LAYERS["everything"], page_size=page_size))
    assert relative_error(case.run(backend), case.run_oracle()) < BF16_TOLERANCE


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_may_lie_head_after_head(backend):
    """As models leave them that join a rotated part and another one; kernels say what they take."""
    case = build_case(half(DECODE))
    wanted = case.run_oracle()
    own = backend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    own.init_forward_metadata(case.batch)
    q = case.q.transpose(0, 1).contiguous().transpose(0, 1)
    out = own.forward(q, case.k, case.v, case.layer, case.batch)
    assert relative_error(out, wanted) < BF16_TOLERANCE


def test_window_counts_the_query_itself_and_the_kernel_does_not():
    assert kernel_window(24) == (23, 0)
    assert kernel_window(1) == (0, 0)
    assert kernel_window(-1) == (-1, -1)


def test_metadata_holds_lengths_maxima_and_pages():
    case = build_case(half(MIXED, page_size=16))
    backend = backend_of(case)
    backend.init_forward_metadata(case.batch)
    metadata = backend._metadata[-1]
    assert metadata.cache_seqlens_int32.tolist() == [41, 300, 256, 26, 1]
    assert metadata.cu_seqlens_q.tolist() == [0, 1, 301, 302, 311, 312]
    assert metadata.cu_seqlens_k.tolist() == [0, 41, 341, 597, 623, 624]
    assert (metadata.max_seq_len_q, metadata.max_seq_len_k) == (300, 300)
    assert metadata.page_table.shape == (5, 19)


@pytest.mark.parametrize("backend", BACKENDS)
def test_idle_and_empty_rows_are_fine(backend):
    out = build_case(half(())).run(backend)
    assert out.shape == (0, 8, 32)
    case = build_case(half(rows_of((30, 0), (30, 4), (5, 1))))
    assert relative_error(case.run(FlashAttentionBackend), case.run_oracle()) < BF16_TOLERANCE


def padded(case: AttentionCase, batch_size: int) -> ForwardBatch:
    """The batch with rows without keys behind it, as a graph of batch_size rows is fed."""
    batch, extra = case.batch, batch_size - case.batch.batch_size
    zeros = torch.zeros(extra, dtype=torch.int32)
    return replace(
        batch,
        batch_size=batch_size,
        req_pool_indices=torch.cat([batch.req_pool_indices, zeros.long()]),
        seq_lens=torch.cat([batch.seq_lens, zeros]),
        extend_seq_lens=torch.cat([batch.extend_seq_lens, zeros + 1]),
    )


@pytest.mark.parametrize("backend_class", BACKENDS)
def test_recorded_tables_follow_the_batch_s_tensors(backend_class):
    first = build_case(half(DECODE, page_size=16, layout_seed=1))
    second = build_case(half(DECODE, page_size=16, layout_seed=2))
    backend = backend_class(first.config, first.req_to_token_pool, first.token_to_kv_pool)
    backend.init_cuda_graph_state(16)
    backend.init_forward_metadata_capture_cuda_graph(padded(first, 8))
    first.req_to_token_pool.req_to_token.copy_(second.req_to_token_pool.req_to_token)
    for to, source in zip(
        first.token_to_kv_pool.get_kv_buffer(0),
        second.token_to_kv_pool.get_kv_buffer(0),
        strict=True,
    ):
        to.copy_(source)
    backend.record_step_tables(padded(second, 8))
    q = torch.cat([second.q, torch.zeros(2, 8, 32, dtype=torch.bfloat16)])
    out = backend.forward_decode(q, second.k, second.v, second.layer, second.batch)
    assert relative_error(out[:-2], second.run_oracle()) < BF16_TOLERANCE
    assert not out[-2:].any()


def test_every_step_plans_its_splits_from_its_own_lengths():
    case = build_case(half(DECODE))
    backend = backend_of(case)
    for lengths in ([1, 2, 16, 17, 301, 65], [1, 1, 1, 1, 1, 1]):
        batch = replace(case.batch, seq_lens=torch.tensor(lengths, dtype=torch.int32))
        backend.init_forward_metadata(batch)
        backend.forward(case.q, case.k, case.v, case.layer, batch)
        assert backend._schedules[-1, False].tolist() == lengths


def test_a_layer_that_plans_nothing_never_sees_an_older_step_s_plan():
    case = build_case(half(DECODE))
    config = replace(case.config, num_layers=2, layers=(LAYERS["plain"],) * 2)
    pool = MHATokenToKVPool(config, case.token_to_kv_pool.num_pages)
    backend = FlashAttentionBackend(config, case.req_to_token_pool, pool)
    backend.init_forward_metadata(case.batch)
    backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    backend.init_forward_metadata(case.batch)
    case.layer.layer_id = 1
    backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    assert backend._schedules == {}


def test_triton_decode_plans_every_step_and_window_anew():
    window, plain = LAYERS["window"], LAYERS["plain"]
    case = build_case(half(DECODE))
    config = replace(case.config, num_layers=3, layers=(plain, window, plain))
    pool = MHATokenToKVPool(config, case.token_to_kv_pool.num_pages)
    backend = TritonDecodeFlashAttentionBackend(config, case.req_to_token_pool, pool)
    for length in (16, 1):
        lengths = torch.full((6,), length, dtype=torch.int32)
        backend.init_forward_metadata(replace(case.batch, seq_lens=lengths))
        plans = backend._decoder._plans
        assert plans.keys() == {-1, 24}
        assert all(torch.equal(plan.tensor, lengths) for plan in plans.values())


def test_triton_decode_without_a_plan_is_refused():
    case = build_case(half(DECODE))
    backend = TritonDecodeFlashAttentionBackend(
        case.config, case.req_to_token_pool, case.token_to_kv_pool
    )
    backend.init_cuda_graph_state(8)
    backend.init_forward_metadata_capture_cuda_graph(case.batch)
    with pytest.raises(RuntimeError, match="before its first layer"):
        backend.forward(case.q, case.k, case.v, case.layer, case.batch)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_a_projected_step_equals_the_same_step_of_finished_heads(layer):
    case = build_case(half(DECODE, layer=layer, head_dim=64, v_head_dim=64))
    backend = TritonDecodeFlashAttentionBackend(
        case.config, case.req_to_token_pool, case.token_to_kv_pool
    )
    assert backend.fuses_decode_projection(1)
    projection = draw_projection(
        (3, 6, 16 * 64), 64, 512,
        dtype=torch.bfloat16, partial_dtype=torch.float32, has_extras=True, device=case.q.device,
    )  # fmt: skip
    q, k, v = (x.to(torch.bfloat16) for x in finish(projection, case.batch.positions, 8, 4))
    expected = replace(case, q=q, k=k, v=v).run(FlashAttentionBackend)
    for buffer in case.token_to_kv_pool.get_kv_buffer(0):
        buffer.flatten(0, 1)[case.batch.out_cache_loc] = torch.nan
    batch = replace(case.batch, attn_backend=backend)
    backend.init_forward_metadata(batch)
    out = case.layer.forward_projected(projection, batch)
    assert torch.equal(out.view(expected.shape), expected)


def test_projections_that_no_kernel_finishes_are_refused():
    case = build_case(half(DECODE))
    projection = draw_projection(
        (1, 6, 16 * 32), 32, 512,
        dtype=torch.bfloat16, partial_dtype=torch.float32, has_extras=False, device=case.q.device,
    )  # fmt: skip
    for backend_class in BACKENDS:
        backend = backend_class(case.config, case.req_to_token_pool, case.token_to_kv_pool)
        backend.init_forward_metadata(case.batch)
        assert not backend.fuses_decode_projection(1)
        with pytest.raises(NotImplementedError, match="rotated"):
            backend.forward_projected(projection, case.layer, case.batch)


def test_triton_decode_wants_heads_of_one_size():
    case = build_case(half(DECODE, head_dim=32, v_head_dim=16))
    with pytest.raises(AttentionBackendError, match="one size"):
        case.run(TritonDecodeFlashAttentionBackend)


@pytest.mark.parametrize("rows", [FRESH, EXTEND], ids=["fresh", "extend"])
def test_keys_saved_by_somebody_else_are_read_from_the_pool(rows):
    case = build_case(half(rows))
    expected = case.run(FlashAttentionBackend)
    backend = backend_of(case)
    backend.init_forward_metadata(case.batch)
    nothing = torch.full_like(case.k, torch.nan)
    out = backend.forward(case.q, nothing, nothing, case.layer, case.batch, save_kv_cache=False)
    assert torch.equal(out, expected)


def test_deterministic_variation_never_splits(monkeypatch):
    seen = []
    kernels = fake_flash_attention_3()

    def attend(*tensors, **arguments):
        seen.append((arguments["num_splits"], arguments["scheduler_metadata"]))
        return kernels.attend(*tensors, **arguments)

    monkeypatch.setattr(
        flash_attention, "load_flash_attention_3", lambda: replace(kernels, attend=attend)
    )
    build_case(half(DECODE)).run(DeterministicFlashAttentionBackend)
    assert seen == [(1, None)]


def test_graph_methods_say_what_is_missing_or_too_large():
    case = build_case(half(DECODE))
    backend = backend_of(case)
    with pytest.raises(RuntimeError, match="init_cuda_graph_state"):
        backend.init_forward_metadata_capture_cuda_graph(case.batch)
    backend.init_cuda_graph_state(4)
    for method in (backend.init_forward_metadata_capture_cuda_graph, backend.record_step_tables):
        with pytest.raises(ValueError, match="6 rows.*at most 4"):
            method(case.batch)


def test_forward_without_metadata_or_with_an_unknown_window_is_refused():
    case = build_case(half(DECODE))
    backend = backend_of(case)
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    backend.init_forward_metadata(case.batch)
    case.layer.sliding_window_size = 33
    with pytest.raises(ValueError, match="sliding_window_size=33"):
        backend.forward(case.q, case.k, case.v, case.layer, case.batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_dtype": torch.float16}, "torch.float16"),
        ({"head_dim": 36, "v_head_dim": 36}, "multiples of 8"),
        ({"head_dim": 512, "v_head_dim": 512}, "up to 256"),
    ],
)
def test_geometry_without_a_kernel_is_refused(changes, message):
    case = build_case(half(DECODE))
    config = replace(case.config, **changes)
    with pytest.raises(AttentionBackendError, match=message):
        FlashAttentionBackend(config, case.req_to_token_pool, case.token_to_kv_pool)


def test_sinks_need_a_package_that_has_them(monkeypatch):
    monkeypatch.setattr(
        flash_attention, "load_flash_attention_3", lambda: fake_flash_attention_3(has_sinks=False)
    )
    build_case(half(DECODE)).run(FlashAttentionBackend)
    with pytest.raises(AttentionBackendError, match="no attention sinks"):
        build_case(half(DECODE, layer=LAYERS["sinks"])).run(FlashAttentionBackend)


def fp8_twin(case: AttentionCase, k_scale: float, v_scale: float) -> AttentionCase:
    """The case over an fp8 pool that holds what the case's pool holds."""
    config = replace(case.config, kv_dtype=torch.float8_e4m3fn)
    pool = CudaFp8MHATokenToKVPool(config, case.token_to_kv_pool.num_pages)
    pool.set_scales(0, k_scale, v_scale)
    everywhere = torch.arange(pool.num_pages * pool.page_size)
    k, v = (buffer.flatten(0, 1) for buffer in case.token_to_kv_pool.get_kv_buffer(0))
    pool.set_kv_buffer(0, everywhere, k.nan_to_num(), v.nan_to_num())
    return replace(case, config=config, token_to_kv_pool=pool)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_fp8_cache_agrees_with_oracle_over_exact_values(rows, layer):
    case = build_case(half(rows, layer=layer))
    out = fp8_twin(case, 0.01, 0.02).run(Fp8FlashAttentionBackend)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, case.run_oracle()) < FP8_TOLERANCE


def test_fp8_backend_wants_its_pool_and_dtypes():
    case = build_case(half(DECODE))
    with pytest.raises(AttentionBackendError, match="float8_e4m3fn"):
        case.run(Fp8FlashAttentionBackend)
    config = replace(case.config, kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(AttentionBackendError, match="Fp8MHATokenToKVPool"):
        Fp8FlashAttentionBackend(config, case.req_to_token_pool, case.token_to_kv_pool)


def test_pool_scales_are_positive_and_pools_follow_the_config():
    config = build_case(half(DECODE)).config
    pool = Fp8MHATokenToKVPool(replace(config, kv_dtype=torch.float8_e4m3fn), 4)
    with pytest.raises(ValueError, match="positive"):
        pool.set_scales(0, 0.0, 1.0)
    with pytest.raises(AttentionBackendError, match="float8_e4m3fn"):
        Fp8MHATokenToKVPool(config, 4)
    assert type(cuda_kv_pool.create_mha_pool(config, 4)) is MHATokenToKVPool
