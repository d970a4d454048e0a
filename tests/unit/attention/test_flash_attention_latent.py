"""fa3 over latents against the float64 oracle over the heads that they stand for.

The kernels are replaced by what they document; what the real ones do with the same arguments is
tests/gpu/attention's to find out.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention import ForwardMode
from attention.backends import flash_attention_latent, flash_attention_prompts
from attention.backends.flash_attention_latent import FlashAttentionLatentBackend
from attention.backends.flash_attention_prompts import PromptAttention
from attention.capability import AttentionBackendError
from attention.kernels.latent_prefix import CachedRows, prefix_pieces
from tests.fakes.flash_attention import attend, fake_flash_attention_3, fake_triton_kernels
from tests.unit.attention.cases import CaseSpec, build_case, relative_error, rows_of
from tests.unit.attention.latent_cases import (
    ENTRY,
    HEADS,
    NOPE_DIM,
    V_HEAD_DIM,
    build_latent_case,
)

BF16_TOLERANCE = 1.5e-2
DECODE = rows_of((0, 1), (1, 1), (15, 1), (16, 1), (17, 1), (300, 1), (64, 1))
EXTEND = rows_of((0, 5), (7, 130), (128, 2), (33, 16))
MIXED = rows_of((40, 1), (0, 300), (255, 1), (17, 9), (0, 1))
AFTER_PREFIXES = rows_of((90, 1), (7, 1), (150, 140), (0, 200), (33, 160), (64, 64))
LITTLE_NEW = rows_of((90, 1), (150, 5), (33, 16))
FRESH = rows_of((0, 5), (0, 130), (0, 1), (0, 40))
STEPS = {
    "decode": DECODE,
    "extend": EXTEND,
    "mixed": MIXED,
    "fresh": FRESH,
    "prefixes": AFTER_PREFIXES,
}


@pytest.fixture(autouse=True)
def fake_kernels(monkeypatch):
    module = flash_attention_latent
    monkeypatch.setattr(module, "load_flash_attention_3", fake_flash_attention_3)
    monkeypatch.setattr(module, "load_triton_kernels", fake_triton_kernels)


def half(rows, **changes):
    return CaseSpec(rows, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, **changes)


def backend_of(case):
    return FlashAttentionLatentBackend(case.config, case.table, case.pool)


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_arguments_mean_what_the_oracle_computes(rows, page_size):
    case = build_latent_case(half(rows, page_size=page_size))
    assert relative_error(case.run(backend_of(case)), case.run_oracle()) < BF16_TOLERANCE


@pytest.mark.parametrize(
    ("rows", "called"),
    [
        (FRESH, ["heads"]),
        (DECODE, ["absorbed"]),
        (LITTLE_NEW, ["absorbed"]),
        (MIXED, ["heads", "heads", "absorbed"]),
        (AFTER_PREFIXES, ["heads", "heads", "absorbed"]),
    ],
    ids=["fresh", "decode", "little_new", "mixed", "prefixes"],
)
def test_prompts_attend_over_heads_where_that_costs_less(rows, called, monkeypatch):
    """Once to themselves, once for each piece of what was cached; what decodes stays absorbed."""
    case = build_latent_case(half(rows))
    backend, calls = backend_of(case), []
    kernels = backend._kernels

    def watch(name, kernel):
        return lambda *args, **named: calls.append(name) or kernel(*args, **named)

    watched = replace(
        kernels,
        attend=watch("absorbed", attend),
        attend_flat=watch("heads", kernels.attend_flat),
    )
    monkeypatch.setattr(backend, "_kernels", watched)
    monkeypatch.setattr(backend, "_prompts", PromptAttention(watched))
    case.run(backend)
    assert calls == called


@pytest.mark.parametrize("max_tokens", [1, 50, 250])
def test_any_pieces_of_the_prefix_give_the_same(max_tokens, monkeypatch):
    token_bytes = HEADS * (NOPE_DIM + ENTRY.rope_dim + V_HEAD_DIM) * torch.bfloat16.itemsize
    limit = max_tokens * token_bytes
    monkeypatch.setattr(flash_attention_prompts, "MAX_PIECE_BYTES", limit)
    case = build_latent_case(half(AFTER_PREFIXES))
    assert relative_error(case.run(backend_of(case)), case.run_oracle()) < BF16_TOLERANCE


def test_a_cached_token_that_is_no_number_spoils_its_own_row_alone():
    """Were it hidden, the row would go on from what is wrong instead of being ended."""
    case = build_latent_case(half(AFTER_PREFIXES))
    slot = case.batch.req_pool_indices[2]
    case.pool.get_latent(0).flatten(0, 1)[case.table.req_to_token[slot, 3].long()] = torch.nan
    out = case.run(backend_of(case)).flatten(1)
    assert out.isnan().any(dim=1).nonzero().flatten().tolist() == list(range(2, 142))


def test_pieces_hold_each_cached_token_once():
    case = build_latent_case(half(AFTER_PREFIXES))
    slots, lens = case.batch.req_pool_indices, case.batch.extend_prefix_lens
    rows = CachedRows(slots, lens, lens.numpy())
    pieces = list(prefix_pieces(case.table, rows, 100))
    assert len(pieces) > 2
    assert all(len(piece.cache_indices) <= 100 for piece in pieces)
    for row, length in enumerate(lens.tolist()):
        bounds = [piece.cu_seqlens[row : row + 2].tolist() for piece in pieces]
        parts = [piece.cache_indices[slice(*b)] for piece, b in zip(pieces, bounds, strict=True)]
        expected = case.table.req_to_token[slots[row], :length]
        assert torch.cat(parts).tolist() == expected.tolist()


def test_a_prompt_in_chunks_is_that_prompt():
    length, chunk = 280, 64
    whole = build_latent_case(half(rows_of((0, length))))
    tokens, backend = whole.tokens(), backend_of(whole)
    parts = []
    for start in range(0, length, chunk):
        stop = min(start + chunk, length)
        lens = np.array([[stop], [stop - start], [start]], dtype=np.int32)
        seq_lens, new, prefix = (torch.from_numpy(n) for n in lens)
        batch = replace(
            whole.batch,
            forward_mode=ForwardMode.EXTEND,
            num_tokens=stop - start,
            positions=torch.arange(start, stop),
            input_ids=torch.zeros(stop - start, dtype=torch.int64),
            seq_lens=seq_lens,
            extend_seq_lens=new,
            extend_prefix_lens=prefix,
            out_cache_loc=whole.batch.out_cache_loc[start:stop],
            seq_lens_cpu=lens[0],
            extend_seq_lens_cpu=lens[1],
            extend_prefix_lens_cpu=lens[2],
            attn_backend=backend,
        )
        backend.init_forward_metadata(batch)
        own = tokens.split(start)[1].split(stop - start)[0]
        with torch.inference_mode():
            parts.append(whole.layer(own, whole.up, batch).view(-1, HEADS, V_HEAD_DIM))
    assert relative_error(torch.cat(parts), whole.run_oracle()) < BF16_TOLERANCE


def test_a_captured_step_reads_static_tables():
    """A replay is a second filling of the tables that the captured metadata looks at."""
    case = build_latent_case(half(DECODE))
    backend = backend_of(case)
    backend.init_cuda_graph_state(len(DECODE) + 3)
    backend.init_forward_metadata_capture_cuda_graph(case.batch)
    backend.record_step_tables(case.batch)
    with torch.inference_mode():
        out = case.layer(case.tokens(), case.up, replace(case.batch, attn_backend=backend))
    assert relative_error(out.view(-1, HEADS, V_HEAD_DIM), case.run_oracle()) < BF16_TOLERANCE
    tables = backend._graph_tables[0]
    assert backend._metadata.page_table.data_ptr() == tables.page_table.data_ptr()


def test_a_package_without_queries_of_values_is_refused(monkeypatch):
    old = replace(fake_flash_attention_3(), takes_qv=False)
    monkeypatch.setattr(flash_attention_latent, "load_flash_attention_3", lambda: old)
    with pytest.raises(AttentionBackendError, match="qv"):
        backend_of(build_latent_case(half(DECODE)))


def test_latents_of_another_dtype_are_refused():
    spec = CaseSpec(DECODE, dtype=torch.bfloat16, kv_dtype=torch.float16)
    with pytest.raises(AttentionBackendError, match="float16"):
        backend_of(build_latent_case(spec))


def test_a_pool_of_heads_is_refused():
    case, heads = build_latent_case(half(DECODE)), build_case(half(DECODE))
    with pytest.raises(AttentionBackendError, match="MHATokenToKVPool"):
        FlashAttentionLatentBackend(case.config, case.table, heads.token_to_kv_pool)


def test_forward_before_the_step_was_planned_is_an_error():
    case = build_latent_case(half(DECODE))
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        case.layer(case.tokens(), case.up, replace(case.batch, attn_backend=backend_of(case)))
