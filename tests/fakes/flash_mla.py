"""FlashMLA's dense decode kernel in plain torch, written from its documentation."""

from __future__ import annotations

import torch

from attention.kernels.providers import FlashMLA

PAGE_SIZE, HEAD_DIM, LATENT_DIM = 64, 576, 512


def fake_flash_mla() -> FlashMLA:
    return FlashMLA(attend, plan)


def plan(
    cache_seqlens: torch.Tensor, num_q_tokens_per_head_k: int, num_heads_k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Copies of the lengths, so that a test can see which step a plan was made from."""
    assert cache_seqlens.dtype == torch.int32
    assert int(cache_seqlens.min()) > 0
    assert (num_q_tokens_per_head_k > 0, num_heads_k) == (True, 1)
    return cache_seqlens.clone(), cache_seqlens.clone()


def attend(
    *,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    head_dim_v: int,
    tile_scheduler_metadata: torch.Tensor,
    num_splits: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q (bs, 1, heads, 576) -> (bs, 1, heads, 512) and the log-sum-exp (bs, heads, 1)."""
    assert causal
    assert head_dim_v == LATENT_DIM
    assert k_cache.shape[1:] == (PAGE_SIZE, 1, HEAD_DIM)
    assert q.shape[1::2] == (1, HEAD_DIM)
    assert block_table.dtype == cache_seqlens.dtype == torch.int32
    assert torch.equal(tile_scheduler_metadata, cache_seqlens), "the plan of another step"
    assert torch.equal(num_splits, cache_seqlens)
    out = torch.zeros((*q.shape[:3], head_dim_v), dtype=torch.float64)
    lse = torch.zeros((q.shape[0], q.shape[2], 1))
    for row, num_keys in enumerate(cache_seqlens.tolist()):
        positions = torch.arange(num_keys)
        pages = block_table[row][positions // PAGE_SIZE].long()
        keys = k_cache[pages, positions % PAGE_SIZE, 0].double()
        scores = q[row, 0].double() @ keys.t() * softmax_scale
        lse[row, :, 0] = torch.logsumexp(scores, dim=-1)
        out[row, 0] = torch.softmax(scores, dim=-1) @ keys[:, :head_dim_v]
    return out.to(q.dtype), lse
