"""torch_native over latents against the float64 oracle over the heads that they stand for."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention import ForwardMode, LatentEntry, UpProjections
from attention.backends import torch_native_latent
from attention.backends.torch_native import TorchNativeBackend
from attention.backends.torch_native_latent import TorchNativeLatentBackend
from attention.capability import AttentionBackendError
from attention.features import Feature
from attention.kernels.torch_latent import absorbing_pays
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from attention.registry import ATTENTION_BACKENDS, LATENT_BACKENDS, create_attention_backend
from attention.timing import CpuAttentionTimer
from tests.proofs.cells import proves
from tests.unit.attention.cases import CaseSpec, RowSpec, build_case, relative_error, rows_of
from tests.unit.attention.latent_cases import build_latent_case

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.5e-2, torch.float16: 2e-3}
SAME_FLOAT32 = 2e-6

DECODE = rows_of((0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (300, 1), (511, 1), (64, 1))
RAGGED_EXTEND = rows_of((0, 5), (7, 130), (0, 257), (128, 2), (33, 16), (700, 33), (0, 1100))
MIXED = rows_of((40, 1), (0, 300), (255, 1), (17, 9), (3, 1), (600, 140), (0, 1))
STEPS = {"decode": DECODE, "extend": RAGGED_EXTEND, "mixed": MIXED}

every_step = pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())


def error_against_oracle(spec: CaseSpec) -> float:
    case = build_latent_case(spec)
    return relative_error(case.run(), case.run_oracle())


@proves("torch_native", Feature.MLA)
@every_step
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_float32_agrees_with_the_oracle_over_expanded_heads(rows, page_size):
    assert error_against_oracle(CaseSpec(rows, page_size=page_size)) < TOLERANCE[torch.float32]


@every_step
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_agrees_with_the_oracle(rows, dtype):
    assert error_against_oracle(CaseSpec(rows, dtype=dtype, kv_dtype=dtype)) < TOLERANCE[dtype]


@every_step
def test_the_pool_may_hold_another_dtype_than_the_model(rows):
    spec = CaseSpec(rows, dtype=torch.float32, kv_dtype=torch.bfloat16)
    assert error_against_oracle(spec) < TOLERANCE[torch.float32]


@every_step
def test_page_size_and_page_order_do_not_change_a_single_bit(rows):
    first = build_latent_case(CaseSpec(rows)).run()
    for page_size in (1, 64, 256):
        spec = CaseSpec(rows, page_size=page_size, layout_seed=page_size)
        assert torch.equal(build_latent_case(spec).run(), first)


@every_step
def test_a_row_does_not_depend_on_its_batch(rows):
    spec = CaseSpec(rows)
    case = build_latent_case(spec)
    for row, out in zip(rows, case.by_row(case.run()), strict=True):
        alone = build_latent_case(spec.with_rows(row)).run()
        assert relative_error(out, alone) < SAME_FLOAT32


@pytest.mark.parametrize("keys_per_piece", [1, 7, 64, 4096])
@pytest.mark.parametrize("queries_per_block", [3, 128])
def test_pieces_of_any_size_merge_to_one_softmax(monkeypatch, keys_per_piece, queries_per_block):
    monkeypatch.setattr(torch_native_latent, "KEYS_PER_PIECE", keys_per_piece)
    monkeypatch.setattr(torch_native_latent, "QUERIES_PER_BLOCK", queries_per_block)
    spec = CaseSpec(rows_of((70, 40), (0, 66), (5, 1)))
    assert error_against_oracle(spec) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("keys_class", ["AbsorbedKeys", "ExpandedKeys"])
@pytest.mark.parametrize("page_size", [1, 16])
def test_either_form_serves_rows_of_any_length(monkeypatch, keys_class, page_size):
    is_absorbed = keys_class == "AbsorbedKeys"
    monkeypatch.setattr(torch_native_latent, "absorbing_pays", lambda *_: is_absorbed)
    spec = CaseSpec(rows_of((70, 40), (0, 300), (600, 2), (5, 1)), page_size=page_size)
    assert error_against_oracle(spec) < TOLERANCE[torch.float32]


def test_rows_take_the_form_with_fewer_multiply_adds():
    """DeepSeek-V2-Lite's heads: 1,088 against 320 a pair, and 131,072 a key for making heads."""
    up = UpProjections(torch.empty(1, 128, 512), torch.empty(1, 128, 512))
    pays = [absorbing_pays(n, up, LatentEntry(512, 64)) for n in (2, 170, 171, 5000)]
    assert pays == [True, True, False, False]


def test_no_more_than_a_piece_is_up_projected_at_a_time(monkeypatch):
    pieces = []

    class Watched(torch_native_latent.ExpandedKeys):
        def __init__(self, latents, up, layer, dtype):
            pieces.append(len(latents))
            super().__init__(latents, up, layer, dtype)

    monkeypatch.setattr(torch_native_latent, "ExpandedKeys", Watched)
    build_latent_case(CaseSpec(rows_of((1000, 200), (9, 1)))).run()
    assert pieces == [512, 512, 176]


@pytest.mark.parametrize("chunk", [1, 64, 129])
def test_chunked_prefill_gives_what_one_prefill_gives(chunk):
    length = 280 if chunk > 1 else 40
    # A row's contents are drawn for its whole length, so every chunk is a step of the same row.
    whole = build_latent_case(CaseSpec((RowSpec(0, length, 5),)))
    backend, (content,) = whole.backend(), whole.contents
    parts = []
    with torch.inference_mode():
        for start in range(0, length, chunk):
            batch = chunk_of(whole.batch, start, min(start + chunk, length), backend)
            backend.init_forward_metadata(batch)
            case = replace(whole, spec=CaseSpec((RowSpec(start, 0, 5),)))
            new = case.tokens()
            cut = replace(
                new,
                q_nope=new.q_nope[: batch.num_tokens],
                q_rope=new.q_rope[: batch.num_tokens],
                latent=new.latent[: batch.num_tokens],
                k_rope=new.k_rope[: batch.num_tokens],
            )
            parts.append(whole.layer(cut, whole.up, batch))
    assert len(content.latent) == length
    together = build_latent_case(whole.spec).run()
    assert relative_error(torch.cat(parts), together.flatten(1)) < SAME_FLOAT32


def chunk_of(batch, start, stop, backend):
    """Tokens start .. stop - 1 of a batch of one row."""
    lengths = np.array([[stop], [stop - start], [start]], dtype=np.int32)
    seq_lens, new, prefix = (torch.from_numpy(length) for length in lengths)
    return replace(
        batch,
        forward_mode=ForwardMode.DECODE if stop - start == 1 else ForwardMode.EXTEND,
        num_tokens=stop - start,
        positions=torch.arange(start, stop),
        input_ids=torch.zeros(stop - start, dtype=torch.int64),
        seq_lens=seq_lens,
        extend_seq_lens=new,
        extend_prefix_lens=prefix,
        out_cache_loc=batch.out_cache_loc[start:stop],
        seq_lens_cpu=lengths[0],
        extend_seq_lens_cpu=lengths[1],
        extend_prefix_lens_cpu=lengths[2],
        attn_backend=backend,
    )


def test_padding_rows_come_out_as_zeros():
    spec = CaseSpec(rows_of((9, 1), (3, 1)))
    case = build_latent_case(spec)
    lengths = case.batch.seq_lens_cpu.copy()
    lengths[1] = 0
    case.batch.seq_lens_cpu = lengths
    out = case.run()
    assert torch.equal(out[1], torch.zeros_like(out[1]))
    expected = build_latent_case(spec.with_rows(spec.rows[0])).run()
    assert relative_error(out[:1], expected) < SAME_FLOAT32


def test_a_timer_passes_latents_on_and_counts_them():
    case = build_latent_case(CaseSpec(rows_of((9, 1), (3, 4))))
    timer = CpuAttentionTimer(case.backend())
    batch = replace(case.batch, attn_backend=timer)
    timer.begin_step(batch)
    timer.backend.init_forward_metadata(batch)
    with torch.inference_mode():
        case.layer(case.tokens(), case.up, batch)
    timing = timer.end_step()
    assert timing is not None
    assert (timing.backend, timing.bytes_read) == ("torch_native", (10 + 7) * (40 + 16) * 4)


def test_a_backend_over_heads_refuses_latents_and_the_other_way_round():
    case, heads = build_latent_case(CaseSpec(rows_of((9, 1)))), build_case(CaseSpec(DECODE))
    over_heads = TorchNativeBackend(heads.config, heads.req_to_token_pool, heads.token_to_kv_pool)
    with pytest.raises(AttentionBackendError, match="torch_native has no multi-head latent"):
        case.layer(case.tokens(), case.up, replace(case.batch, attn_backend=over_heads))
    over_latents = replace(heads.batch, attn_backend=case.backend())
    for mode in (ForwardMode.DECODE, ForwardMode.EXTEND):
        batch = replace(over_latents, forward_mode=mode)
        with pytest.raises(AttentionBackendError, match="built for latents"):
            heads.layer(heads.q.flatten(1), heads.k.flatten(1), heads.v.flatten(1), batch)
    with pytest.raises(AttentionBackendError, match="not MHATokenToKVPool"):
        TorchNativeLatentBackend(case.config, case.table, MHATokenToKVPool(case.config, 4))


def test_forward_before_the_step_was_planned_is_an_error():
    case = build_latent_case(CaseSpec(rows_of((9, 1))))
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        case.layer(case.tokens(), case.up, replace(case.batch, attn_backend=case.backend()))


def test_what_declares_latent_attention_is_what_can_be_built_for_it():
    declared = {entry.capability.name for entry in ATTENTION_BACKENDS if entry.capability.has_mla}
    registered = {entry.capability.name for entry in LATENT_BACKENDS}
    assert declared == registered
    assert {"torch_native", "fa3", "flashmla", "triton"} <= declared
    case = build_latent_case(CaseSpec(rows_of((9, 1))))
    built = create_attention_backend("torch_native", case.config, case.table, case.pool)
    assert type(built) is TorchNativeLatentBackend
    with pytest.raises(AttentionBackendError, match="torch_native_fp8"):
        create_attention_backend("torch_native_fp8", case.config, case.table, case.pool)
