"""Blackwell's decode kernels in plain torch, with what their packages check first.

Written from sgl_kernel/attention.py of sglang-kernel 0.4.3 and flashinfer/mla/_core.py
and flashinfer/decode.py of flashinfer 0.6.12: the same names, shapes, dtypes and refusals.
"""

from __future__ import annotations

import torch

from attention.kernels.blackwell import CutlassMLA

LATENT_DIM, ROPE_DIM = 512, 64
MAX_HEADS = 128
WORKSPACE_BYTES_A_ROW = 64
TRTLLM_PAGE_SIZES = (32, 64)


def fake_cutlass_mla() -> CutlassMLA:
    return CutlassMLA(cutlass_mla_decode, cutlass_mla_get_workspace_size)


def cutlass_mla_get_workspace_size(
    max_seq_len: int, num_batches: int, sm_count: int = 0, num_kv_splits: int = 1
) -> int:
    assert max_seq_len > 0
    assert num_batches > 0
    return WORKSPACE_BYTES_A_ROW * num_batches


def cutlass_mla_decode(
    q_nope: torch.Tensor,
    q_pe: torch.Tensor,
    kv_c_and_k_pe_cache: torch.Tensor,
    seq_lens: torch.Tensor,
    page_table: torch.Tensor,
    workspace: torch.Tensor,
    sm_scale: float,
    num_kv_splits: int = 1,
) -> torch.Tensor:
    """(rows, heads, 512) of one query a row."""
    num_rows, num_heads, q_dim = q_nope.shape
    assert q_pe.shape == (num_rows, num_heads, ROPE_DIM)
    assert q_dim == LATENT_DIM
    assert num_heads <= MAX_HEADS
    _, page_size, kept = kv_c_and_k_pe_cache.shape
    assert kept == LATENT_DIM + ROPE_DIM
    assert page_table.shape[0] == num_rows
    assert page_table.shape[1] > 0
    assert page_table.shape[1] % (128 / page_size) == 0
    assert q_nope.dtype in (torch.float16, torch.bfloat16)
    assert q_nope.dtype == q_pe.dtype == kv_c_and_k_pe_cache.dtype
    assert seq_lens.dtype == page_table.dtype == torch.int32
    assert workspace.dtype == torch.uint8
    width = page_table.shape[1] * page_size
    assert len(workspace) >= cutlass_mla_get_workspace_size(width, num_rows)
    q = torch.cat((q_nope, q_pe), dim=-1)
    return _attend(q, kv_c_and_k_pe_cache, page_table, seq_lens, sm_scale)


def trtllm_batch_decode_with_kv_cache_mla(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    workspace_buffer: torch.Tensor,
    qk_nope_head_dim: int,
    kv_lora_rank: int,
    qk_rope_head_dim: int,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    backend: str = "auto",
) -> torch.Tensor:
    """(rows, 1, heads, 512), bfloat16, of one query a row."""
    assert backend == "trtllm-gen"
    assert not workspace_buffer.any()
    assert query.shape[1] == 1
    assert (qk_nope_head_dim, kv_lora_rank, qk_rope_head_dim) == (128, LATENT_DIM, ROPE_DIM)
    _, page_size, kept = kv_cache.shape
    assert page_size in TRTLLM_PAGE_SIZES
    assert query.shape[-1] == kept == LATENT_DIM + ROPE_DIM
    assert block_tables.shape[0] == len(query) == len(seq_lens)
    assert block_tables.shape[1] % (128 / page_size) == 0
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert query.dtype == kv_cache.dtype == torch.bfloat16
    assert int(seq_lens.max()) <= max_seq_len
    return _attend(query[:, 0], kv_cache, block_tables, seq_lens, bmm1_scale)[:, None]


def trtllm_batch_decode_with_kv_cache(
    query: torch.Tensor,
    kv_cache: tuple[torch.Tensor, torch.Tensor],
    workspace_buffer: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    bmm1_scale: float = 1.0,
    window_left: int = -1,
    sinks: torch.Tensor | None = None,
    kv_layout: str = "HND",
    backend: str = "auto",
) -> torch.Tensor:
    """(rows, heads, head_dim) of one query a row, over K and V (pages, page_size, heads, dim)."""
    assert (backend, kv_layout) == ("trtllm-gen", "NHD")
    assert not workspace_buffer.any()
    k_pages, v_pages = kv_cache
    assert query.is_contiguous()
    assert k_pages.shape == v_pages.shape
    assert k_pages.shape[1] in (16, 32, 64)
    assert query.dtype == k_pages.dtype
    assert block_tables.dtype == seq_lens.dtype == torch.int32
    assert len(block_tables) == len(query) == len(seq_lens)
    assert int(seq_lens.min()) > 0
    assert int(seq_lens.max()) <= max_seq_len
    assert sinks is None or (sinks.dtype, len(sinks)) == (torch.float32, query.shape[1])
    page_size, group = k_pages.shape[1], query.shape[1] // k_pages.shape[2]
    out = torch.empty(query.shape, dtype=torch.float64)
    for row, num_keys in enumerate(seq_lens.tolist()):
        first = 0 if window_left < 0 else max(0, num_keys - 1 - window_left)
        places = torch.arange(first, num_keys)
        at = block_tables[row][places // page_size].long(), places % page_size
        keys, values = (
            pages[at].double().repeat_interleave(group, dim=1) for pages in (k_pages, v_pages)
        )
        scores = torch.einsum("hd,khd->hk", query[row].double(), keys) * bmm1_scale
        if sinks is not None:
            scores = torch.cat([scores, sinks.double()[:, None]], dim=1)
        weights = torch.softmax(scores, dim=-1)[:, : len(places)]
        out[row] = torch.einsum("hk,khd->hd", weights, values)
    return out.to(query.dtype)


def _attend(
    q: torch.Tensor,
    pages: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    assert int(seq_lens.min()) > 0, "the kernels expect a key in every row"
    page_size = pages.shape[1]
    out = torch.empty((*q.shape[:2], LATENT_DIM), dtype=torch.float64)
    for row, num_keys in enumerate(seq_lens.tolist()):
        places = torch.arange(num_keys)
        keys = pages[page_table[row][places // page_size].long(), places % page_size].double()
        scores = q[row].double() @ keys.t() * scaling
        out[row] = torch.softmax(scores, dim=-1) @ keys[:, :LATENT_DIM]
    return out.to(q.dtype)
