"""The torch_native backend against the float64 oracle, and against itself in other company."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention import LayerAttentionConfig
from attention.backends import torch_native
from attention.backends.torch_native import TorchNativeBackend
from attention.features import Feature
from attention.kernels import torch_extend
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from tests.proofs.cells import proves
from tests.unit.attention.cases import (
    PAGE_SIZES,
    CaseSpec,
    RowSpec,
    build_case,
    relative_error,
    rows_of,
)

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
SAME_FLOAT32 = 1e-6

DECODE = rows_of((0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (300, 1), (511, 1), (64, 1))
RAGGED_EXTEND = rows_of((0, 5), (7, 130), (0, 257), (128, 2), (33, 16))
MIXED = rows_of((40, 1), (0, 300), (255, 1), (17, 9), (3, 1), (64, 1), (0, 1))
STEPS = {"decode": DECODE, "extend": RAGGED_EXTEND, "mixed": MIXED}

LAYERS = {
    "plain": LayerAttentionConfig(),
    "window": LayerAttentionConfig(sliding_window_size=24),
    "window_of_one": LayerAttentionConfig(sliding_window_size=1),
    "wide_window": LayerAttentionConfig(sliding_window_size=4096),
    "chunks": LayerAttentionConfig(chunk_size=24),
    "chunks_of_one": LayerAttentionConfig(chunk_size=1),
    "wide_chunks": LayerAttentionConfig(chunk_size=257),
    "cap": LayerAttentionConfig(logit_cap=0.8),
    "sinks": LayerAttentionConfig(has_sinks=True),
    "everything": LayerAttentionConfig(sliding_window_size=100, logit_cap=1.5, has_sinks=True),
    "chunks_and_all": LayerAttentionConfig(chunk_size=64, logit_cap=1.5, has_sinks=True),
}


def error_against_oracle(spec: CaseSpec) -> float:
    case = build_case(spec)
    return relative_error(case.run(TorchNativeBackend), case.run_oracle())


@proves("torch_native")
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_float32_agrees_with_oracle_for_every_kind_of_layer(rows, layer):
    assert error_against_oracle(CaseSpec(rows, layer=layer)) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layer", [LAYERS["plain"], LAYERS["everything"]], ids=["plain", "all"])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_half_precision_agrees_with_oracle(rows, layer, dtype):
    spec = CaseSpec(rows, dtype=dtype, kv_dtype=dtype, layer=layer)
    assert error_against_oracle(spec) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_pool_may_hold_another_dtype_than_the_model(rows):
    spec = CaseSpec(rows, dtype=torch.float32, kv_dtype=torch.bfloat16)
    assert error_against_oracle(spec) < TOLERANCE[torch.bfloat16]


@proves("torch_native", Feature.MIXED)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("group", [1, 4, 8])
def test_every_gqa_ratio_at_every_page_size_agrees_with_oracle(page_size, group):
    spec = CaseSpec(MIXED, page_size=page_size, q_heads=8, kv_heads=8 // group, head_dim=16)
    assert error_against_oracle(replace(spec, v_head_dim=16)) < TOLERANCE[torch.float32]


# Rows whose queries end at a border of 32, begin at one, span it and span several.
BORDERS = rows_of((0, 32), (32, 32), (31, 2), (16, 80), (31, 1), (32, 1), (63, 1), (0, 1), (96, 1))


@proves("torch_native", Feature.CHUNKS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rows", [BORDERS, MIXED, RAGGED_EXTEND, DECODE])
def test_chunks_agree_with_oracle_at_every_page_size(page_size, rows):
    layer = LayerAttentionConfig(chunk_size=32)
    assert (
        error_against_oracle(CaseSpec(rows, page_size=page_size, layer=layer))
        < TOLERANCE[torch.float32]
    )


def test_the_oracle_sees_no_key_of_an_earlier_chunk():
    layer = LayerAttentionConfig(chunk_size=16)
    case = build_case(CaseSpec((RowSpec(0, 40, 3),), layer=layer))
    whole = case.run_oracle()
    for start in (0, 16, 32):
        chunk = slice(start, start + 16)
        alone = build_case(CaseSpec((RowSpec(0, len(whole[chunk]), 3),)))
        same = replace(alone, q=case.q[chunk], k=case.k[chunk], v=case.v[chunk])
        assert relative_error(whole[chunk], same.run_oracle()) < 1e-12


@proves("torch_native", Feature.UNEQUAL_HEAD_DIMS)
@pytest.mark.parametrize("layer", [LAYERS["plain"], LAYERS["sinks"]], ids=["plain", "sinks"])
def test_value_heads_may_be_narrower_than_key_heads(layer):
    spec = CaseSpec(MIXED, head_dim=24, v_head_dim=16, layer=layer)
    assert error_against_oracle(spec) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_a_row_does_not_depend_on_its_batch(rows, layer):
    spec = CaseSpec(rows, layer=layer)
    case = build_case(spec)
    together = case.by_row(case.run(TorchNativeBackend))
    for row, out in zip(rows, together, strict=True):
        alone = build_case(spec.with_rows(row)).run(TorchNativeBackend)
        assert relative_error(out, alone) < SAME_FLOAT32


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_page_size_and_page_order_do_not_change_a_single_bit(rows):
    first = build_case(CaseSpec(rows)).run(TorchNativeBackend)
    for page_size in PAGE_SIZES:
        spec = CaseSpec(rows, page_size=page_size, layout_seed=page_size)
        assert torch.equal(build_case(spec).run(TorchNativeBackend), first)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("chunk", [1, 64, 129])
def test_chunked_prefill_gives_what_one_prefill_gives(layer, chunk):
    length = 280 if chunk > 1 else 40
    whole = build_case(CaseSpec((RowSpec(0, length, 5),), layer=layer)).run(TorchNativeBackend)
    parts = []
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        # A row's contents are drawn for its whole length, so every chunk is cut from the same one.
        spec = CaseSpec((RowSpec(0, length, 5),), layer=layer)
        parts.append(run_chunk(spec, start, stop))
    assert relative_error(torch.cat(parts), whole) < SAME_FLOAT32


def run_chunk(spec: CaseSpec, start: int, stop: int) -> torch.Tensor:
    """Tokens start .. stop - 1 of the only row, the ones before them cached."""
    full = build_case(spec)
    row = RowSpec(start, stop - start, spec.rows[0].content_seed)
    case = build_case(spec.with_rows(row))
    locations = case.req_to_token_pool.req_to_token[case.batch.req_pool_indices[0], :stop].long()
    case.token_to_kv_pool.set_kv_buffer(0, locations[:start], full.k[:start], full.v[:start])
    chunk = slice(start, stop)
    same = replace(case, q=full.q[chunk], k=full.k[chunk], v=full.v[chunk])
    return same.run(TorchNativeBackend)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_idle_batch_gives_an_empty_result(dtype):
    out = build_case(CaseSpec((), dtype=dtype, kv_dtype=dtype)).run(TorchNativeBackend)
    assert out.shape == (0, 8, 32)
    assert out.dtype == dtype


def test_rows_without_new_tokens_leave_the_others_alone():
    spec = CaseSpec(rows_of((30, 0), (30, 4), (12, 0), (5, 1)))
    assert error_against_oracle(spec) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_padding_row_without_keys_gives_zeros_never_nan(rows):
    case = build_case(CaseSpec(rows))
    lengths = case.batch.seq_lens_cpu.copy()
    lengths[0] = 0
    padded = replace(case.batch, seq_lens_cpu=lengths, seq_lens=torch.from_numpy(lengths))
    out = replace(case, batch=padded).run(TorchNativeBackend)
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert relative_error(out[1:], case.run(TorchNativeBackend)[1:]) < SAME_FLOAT32


def test_very_ragged_decode_is_cut_into_chunks_and_agrees_with_oracle(monkeypatch):
    monkeypatch.setattr(torch_native, "MAX_CHUNK_KEY_BYTES", 32 * 4 * 4 * 256)
    spec = CaseSpec(rows_of(*[(length, 1) for length in (0, 2047, 3, 900, 64, 1500, 901, 12, 63)]))
    assert error_against_oracle(spec) < TOLERANCE[torch.float32]


def test_saving_can_be_left_to_somebody_else():
    case = build_case(CaseSpec(MIXED))
    expected = case.run(TorchNativeBackend)
    backend = TorchNativeBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.init_forward_metadata(case.batch)
    nothing = torch.full_like(case.k, torch.nan)
    out = backend.forward(case.q, nothing, nothing, case.layer, case.batch, save_kv_cache=False)
    assert torch.equal(out, expected)


def test_forward_without_a_plan_is_refused():
    case = build_case(CaseSpec(DECODE))
    backend = TorchNativeBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        backend.forward(case.q, case.k, case.v, case.layer, case.batch)


def test_a_layer_whose_window_the_config_does_not_know_is_refused():
    case = build_case(CaseSpec(DECODE))
    backend = TorchNativeBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.init_forward_metadata(case.batch)
    case.layer.sliding_window_size = 33
    with pytest.raises(ValueError, match="sliding_window_size=33"):
        backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    case.layer.sliding_window_size, case.layer.chunk_size = -1, 34
    with pytest.raises(ValueError, match="chunk_size=34"):
        backend.forward(case.q, case.k, case.v, case.layer, case.batch)


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_layers_of_different_windows_share_one_step(rows):
    window = LAYERS["window"]
    cases = [build_case(CaseSpec(rows, layer=layer)) for layer in (window, LAYERS["plain"])]
    windowed, plain = cases
    config = replace(plain.config, layers=(window, LAYERS["plain"]), num_layers=2)
    pool = MHATokenToKVPool(config, plain.token_to_kv_pool.num_pages)
    for layer_id, case in enumerate(cases):
        case.layer.layer_id = layer_id
        for to, source in zip(
            pool.get_kv_buffer(layer_id), case.token_to_kv_pool.get_kv_buffer(0), strict=True
        ):
            to.copy_(source)
    backend = TorchNativeBackend(config, plain.req_to_token_pool, pool)
    backend.init_forward_metadata(plain.batch)
    outs = [backend.forward(case.q, case.k, case.v, case.layer, plain.batch) for case in cases]
    windowed.layer.layer_id = plain.layer.layer_id = 0
    assert relative_error(outs[0], windowed.run_oracle()) < TOLERANCE[torch.float32]
    assert relative_error(outs[1], plain.run_oracle()) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_strided_slices_of_a_fused_projection_give_the_same(rows):
    case = build_case(CaseSpec(rows))
    fused = torch.cat([case.q.flatten(1), case.k.flatten(1), case.v.flatten(1)], dim=1)
    q, k, v = fused.split([8 * 32, 4 * 32, 4 * 32], dim=1)
    backend = TorchNativeBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.init_forward_metadata(case.batch)
    out = case.layer(q, k, v, replace(case.batch, attn_backend=backend))
    assert torch.equal(out.view(-1, 8, 32), case.run(TorchNativeBackend))


def test_mask_band_grows_with_the_reach_asked_for():
    bias = torch_extend.CausalBias(window=3, dtype=torch.float32, device=torch.device("cpu"))
    for reach in (0, 2, 700, 5):
        block = bias.block(torch_extend.QueryBlock(0, 2, 0, reach + 2))
        assert block.shape == (2, reach + 2)
        visible = (block == 0).nonzero().tolist()
        first = max(0, reach - 2)
        expected = [[0, key] for key in range(first, reach + 1)]
        expected += [[1, key] for key in range(max(0, reach - 1), reach + 2)]
        assert visible == expected


lengths = st.tuples(st.integers(0, 200), st.integers(0, 150) | st.just(1))


@settings(max_examples=20, deadline=None)
@given(
    pairs=st.lists(lengths, max_size=6),
    page_size=st.sampled_from(PAGE_SIZES),
    kv_heads=st.sampled_from([1, 2, 8]),
    layer=st.sampled_from(list(LAYERS.values())),
    layout_seed=st.integers(0, 10**6),
)
def test_any_step_agrees_with_oracle(pairs, page_size, kv_heads, layer, layout_seed):
    spec = CaseSpec(
        rows_of(*pairs),
        page_size=page_size,
        kv_heads=kv_heads,
        head_dim=8,
        v_head_dim=8,
        layer=layer,
        layout_seed=layout_seed,
    )
    assert error_against_oracle(spec) < TOLERANCE[torch.float32]


@proves(Feature.DETERMINISTIC)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [TorchNativeBackend])
def test_a_token_alone_has_the_same_bits_wherever_its_row_lies(backend, dtype):
    """What deterministic mode makes of every step."""
    for num_keys in (1, 17, 300):
        row = RowSpec(num_keys - 1, 1, 7)
        outs = [
            build_case(
                CaseSpec((row,), dtype=dtype, kv_dtype=dtype, page_size=size, layout_seed=size)
            ).run(backend)
            for size in (1, 16, 64, 256)
        ]
        assert all(torch.equal(out, outs[0]) for out in outs)
