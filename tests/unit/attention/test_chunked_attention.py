"""Chunks of positions on fa3: rows cut where chunks begin, against the oracle."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends import flash_attention
from attention.backends.flash_attention_chunks import ChunkedFlashAttentionBackend
from attention.capability import AttentionBackendError
from attention.kernels.chunk_rows import chunk_rows, decoding_chunk_rows
from attention.preferences import DeviceFacts
from attention.selection import AttentionNeeds, why_unfit
from tests.fakes.flash_attention import fake_flash_attention_3, fake_triton_kernels
from tests.unit.attention.cases import CaseSpec, build_case, relative_error, rows_of

TOLERANCE = 1e-2
STEPS = {
    "decode": rows_of((0, 1), (31, 1), (32, 1), (33, 1), (300, 1), (63, 1)),
    "extend": rows_of((0, 5), (31, 130), (32, 32), (33, 16), (0, 96)),
    "mixed": rows_of(*[(40 + i, 1) for i in range(33)], (0, 300), (255, 1), (17, 9), (30, 0)),
}
LAYERS = {
    "chunks": LayerAttentionConfig(chunk_size=32),
    "cap_and_sinks": LayerAttentionConfig(chunk_size=32, logit_cap=0.8, has_sinks=True),
}


@pytest.fixture(autouse=True)
def fake_kernels(monkeypatch):
    monkeypatch.setattr(flash_attention, "load_flash_attention_3", fake_flash_attention_3)
    monkeypatch.setattr(flash_attention, "load_triton_kernels", fake_triton_kernels)


def half(rows, **changes):
    return CaseSpec(rows, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, **changes)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("page_size", [1, 16, 32])
def test_a_row_of_each_chunk_computes_what_the_oracle_does(page_size, rows, layer):
    case = build_case(half(rows, layer=layer, page_size=page_size))
    assert relative_error(case.run(ChunkedFlashAttentionBackend), case.run_oracle()) < TOLERANCE


def test_layers_without_chunks_run_beside_them():
    rows, window = STEPS["mixed"], LayerAttentionConfig(sliding_window_size=24)
    plain = build_case(half(rows, layer=window))
    config = replace(plain.config, num_layers=2, layers=(window, LAYERS["chunks"]))
    pools = plain.req_to_token_pool, plain.token_to_kv_pool
    backend = ChunkedFlashAttentionBackend(config, *pools)
    batch = replace(plain.batch, attn_backend=backend)
    backend.init_forward_metadata(batch)
    out = plain.layer(plain.q.flatten(1), plain.k.flatten(1), plain.v.flatten(1), batch)
    assert relative_error(out.view(plain.q.shape), plain.run_oracle()) < TOLERANCE


def test_rows_are_cut_as_the_published_description_says():
    """Its example: chunks of 4, new tokens 4, 10 and 5 of 6, 17 and 9."""
    batch = build_case(half(rows_of((2, 4), (7, 10), (4, 5)))).batch
    rows = chunk_rows(batch, 4)
    assert rows.num_new.tolist() == [2, 2, 1, 4, 4, 1, 4, 1]
    assert rows.num_keys.tolist() == [4, 2, 4, 4, 4, 1, 4, 1]
    assert rows.rows.tolist() == [0, 0, 1, 1, 1, 1, 2, 2]
    assert rows.first_keys.tolist() == [0, 4, 4, 8, 12, 16, 4, 8]
    assert (rows.max_new_tokens, rows.max_keys) == (4, 4)


def test_decoding_rows_are_the_same_from_the_device_as_from_the_host():
    batch = build_case(half(STEPS["decode"])).batch
    ours, theirs = decoding_chunk_rows(batch, 32), chunk_rows(batch, 32)
    for name in ("rows", "first_keys", "num_keys", "num_new"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()


@pytest.mark.parametrize("page_size", [1, 16])
def test_recorded_tables_follow_the_batch_s_tensors(page_size):
    layer = LAYERS["chunks"]
    case = build_case(half(STEPS["decode"], layer=layer, page_size=page_size))
    backend = ChunkedFlashAttentionBackend(
        case.config, case.req_to_token_pool, case.token_to_kv_pool
    )
    backend.init_cuda_graph_state(9)
    nothing = torch.zeros(2, dtype=torch.int32)
    batch = replace(
        case.batch,
        batch_size=8,
        req_pool_indices=torch.cat([case.batch.req_pool_indices, nothing.long()]),
        seq_lens=torch.cat([case.batch.seq_lens, nothing]),
        extend_seq_lens=torch.cat([case.batch.extend_seq_lens, nothing + 1]),
        seq_lens_cpu=np.ones(8, dtype=np.int32),
    )
    backend.init_forward_metadata_capture_cuda_graph(batch)
    backend.record_step_tables(batch)
    q = torch.cat([case.q, torch.zeros(2, 8, 32, dtype=torch.bfloat16)])
    out = backend.forward_decode(q, case.k, case.v, case.layer, case.batch)
    assert relative_error(out[:-2], case.run_oracle()) < TOLERANCE
    assert not out[-2:].any()


def test_chunks_that_are_no_whole_pages_are_refused_and_left_to_others():
    case = build_case(half(STEPS["decode"], layer=LayerAttentionConfig(chunk_size=24)))
    with pytest.raises(AttentionBackendError, match="24 tokens are no whole number of pages of 16"):
        case.run(ChunkedFlashAttentionBackend)
    device, half_dtype = DeviceFacts("cuda", "H100", (9, 0)), torch.bfloat16
    capability = ChunkedFlashAttentionBackend.capability
    for chunk_size, is_fit in ((8192, True), (8000, False)):
        needs = AttentionNeeds(
            half_dtype, half_dtype, needs_chunked_attention=True, chunk_size=chunk_size
        )
        assert (why_unfit(capability, device, needs) is None) is is_fit
