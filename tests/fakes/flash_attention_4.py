"""FlashAttention-4's varlen function in plain torch, with its signature and what it refuses.

Read in flash_attn/cute/interface.py of flash-attn-4 4.0.0b15; a test on a GPU holds the signature
to the package that is installed there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.fakes.flash_attention import attend


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: torch.Tensor | None = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    score_mod: Callable[..., Any] | None = None,
    score_mod_bwd: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    block_sparse_tensors: Any = None,
    aux_tensors: list[torch.Tensor] | None = None,
    return_lse: bool = False,
) -> tuple[torch.Tensor, None]:
    """(total_q, heads, v_head_dim) over paged k and v, causal from the end of each row's keys."""
    assert cu_seqlens_q is not None
    assert seqused_k is not None
    assert page_table is not None
    assert max_seqlen_q is not None
    assert max_seqlen_k is not None
    assert num_splits == 1  # others are refused on sm90
    _check(q, v, cu_seqlens_q, seqused_k, page_table, max_seqlen_k, learnable_sink)
    left, right = window_size
    assert right in (None, 0)
    out = attend(
        q,
        k,
        v,
        cache_seqlens=seqused_k,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q,
        softmax_scale=q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale,
        causal=causal,
        window_size=(-1 if left is None else left, 0),
        softcap=softcap,
        num_splits=num_splits,
        scheduler_metadata=None,
        sinks=learnable_sink,
    )
    return out, None


def _check(
    q: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seqused_k: torch.Tensor,
    page_table: torch.Tensor,
    max_seqlen_k: int,
    learnable_sink: torch.Tensor | None,
) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert page_table.shape[0] == len(seqused_k) == len(cu_seqlens_q) - 1
    assert page_table.stride(1) == 1
    assert all(dim % 16 == 0 and dim <= 128 for dim in (q.shape[2], v.shape[3]))
    assert int(seqused_k.max()) <= max_seqlen_k
    if learnable_sink is not None:
        assert learnable_sink.shape == (q.shape[1],)
