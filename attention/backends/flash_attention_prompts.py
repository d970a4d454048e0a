"""Prompts of models that keep latents, over K and V of every head, by FlashAttention-3.

New tokens attend to each other and, piece by piece, to what was cached of their rows: each piece's
latents become K and V that nothing keeps, and states are merged (DeepSeek-V2, arXiv:2405.04434,
section 2.1, the form before W_UK is absorbed). A pair of query and key costs 320 multiply-adds a
head there and 1,088 over the latents, for DeepSeek's heads; making K and V of a cached token costs
131,072. Knows no step but what PromptRows says of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from attention.config import AttentionConfig
from attention.forward_batch import ForwardBatch
from attention.kernels.latent_prefix import CachedRows, PrefixPiece, prefix_pieces
from attention.kernels.merge_states import AttentionState, merge_states
from attention.kernels.providers import FlashAttention3
from attention.latent_inputs import LatentLayer, LatentTokens, UpProjections
from attention.memory.req_to_token_pool import ReqToTokenPool

MAX_PIECE_BYTES = 128 << 20
"""K and V of a piece, all heads: large enough for full tiles, small beside a step's activations."""


@dataclass(frozen=True, slots=True)
class PromptRows:
    """Rows from the step's token first_token to its last. cu_seqlens_q: int32 (rows + 1,), counted
    from that token. max_new_tokens: of any row. pieces: of what the rows have cached."""

    first_token: int
    cu_seqlens_q: torch.Tensor
    max_new_tokens: int
    pieces: tuple[PrefixPiece, ...]


def kernel_has_heads(qk_head_dim: int, v_head_dim: int) -> bool:
    """Whether FlashAttention-3 was built for K and V heads of these sizes."""
    return (
        qk_head_dim == v_head_dim
        or (128 < qk_head_dim <= 192 and 96 < v_head_dim <= 128)
        or (qk_head_dim <= 64 and v_head_dim <= 512)
    )


def heads_pay(config: AttentionConfig, batch: ForwardBatch, first_row: int) -> bool:
    """Whether the rows from first_row on take fewer multiply-adds over K and V of heads than over
    latents, where the kernel has their heads. Absorbing a query costs what making a token's K and V
    does."""
    latent = config.latent
    if latent is None:
        raise ValueError("only models that keep latents have two forms of attention")
    if not kernel_has_heads(config.head_dim, config.v_head_dim):
        return False
    num_new = batch.extend_seq_lens_cpu[first_row:].astype(np.float64)
    prefix = batch.extend_prefix_lens_cpu[first_row:].astype(np.float64)
    pairs = float((num_new * (prefix + (num_new + 1) / 2)).sum())
    per_token = latent.latent_dim * (config.head_dim - latent.rope_dim + config.v_head_dim)
    over_latents = pairs * (latent.elements_per_token + latent.latent_dim)
    over_heads = pairs * (config.head_dim + config.v_head_dim) + float(prefix.sum()) * per_token
    return over_heads <= over_latents


def prompt_rows(
    config: AttentionConfig,
    table: ReqToTokenPool,
    batch: ForwardBatch,
    cu_seqlens_q: torch.Tensor,
    first_row: int,
) -> PromptRows:
    """The step's rows from first_row on; those before bring one token each. cu_seqlens_q: int32
    (batch_size + 1,) of the step."""
    token_elements = config.tp_q_head_num * (config.head_dim + config.v_head_dim)
    cached = CachedRows(
        batch.req_pool_indices[first_row:],
        batch.extend_prefix_lens[first_row:],
        batch.extend_prefix_lens_cpu[first_row:],
    )
    max_tokens = MAX_PIECE_BYTES // (token_elements * config.dtype.itemsize)
    return PromptRows(
        first_token=first_row,
        cu_seqlens_q=cu_seqlens_q[first_row:] - first_row,
        max_new_tokens=int(batch.extend_seq_lens_cpu[first_row:].max()),
        pieces=tuple(prefix_pieces(table, cached, max_tokens)),
    )


class PromptAttention:
    """Computes PromptRows. latents below: (tokens, latent_dim + rope_dim), a layer's pool."""

    def __init__(self, kernels: FlashAttention3) -> None:
        self._kernels = kernels

    def attend(
        self,
        tokens: LatentTokens,
        up: UpProjections,
        layer: LatentLayer,
        rows: PromptRows,
        latents: torch.Tensor,
    ) -> torch.Tensor:
        """tokens: the rows' own -> (n, tp_q_head_num, v_head_dim) in their dtype."""
        q = tokens.q
        own = (rows.cu_seqlens_q, rows.max_new_tokens)
        new_keys = _keys_of(tokens.latent, tokens.k_rope, up)
        if not rows.pieces:
            out, _ = self._call(q, new_keys, rows, own, layer, causal=True)
            return out
        state = self._state(q, new_keys, rows, own, layer, causal=True)
        for piece in rows.pieces:
            cached = latents.index_select(0, piece.cache_indices)
            latent, k_rope = cached.tensor_split((layer.entry.latent_dim,), dim=-1)
            keys = _keys_of(latent, k_rope, up)
            lens = (piece.cu_seqlens, piece.max_keys)
            state = merge_states(state, self._state(q, keys, rows, lens, layer, causal=False))
        return state.out.to(q.dtype)

    def _state(
        self,
        q: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor],
        rows: PromptRows,
        key_lens: tuple[torch.Tensor, int],
        layer: LatentLayer,
        causal: bool,
    ) -> AttentionState:
        out, lse = self._call(q, keys, rows, key_lens, layer, causal)
        # Rows without keys in a piece: the kernel says inf, and puts out anything. NaN stays NaN:
        # a row's fault is to be seen.
        is_empty = lse.isinf()
        lse = lse.masked_fill(is_empty, -torch.inf).t()
        return AttentionState(out.float().masked_fill(is_empty.t().unsqueeze(-1), 0.0), lse)

    def _call(
        self,
        q: torch.Tensor,
        keys: tuple[torch.Tensor, torch.Tensor],
        rows: PromptRows,
        key_lens: tuple[torch.Tensor, int],
        layer: LatentLayer,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """out (n, heads, v_head_dim) and lse, float32 (heads, n)."""
        return self._kernels.attend_flat(
            q,
            *keys,
            cu_seqlens_q=rows.cu_seqlens_q,
            cu_seqlens_k=key_lens[0],
            max_seqlen_q=rows.max_new_tokens,
            max_seqlen_k=key_lens[1],
            softmax_scale=layer.scaling,
            causal=causal,
        )


def _keys_of(
    latent: torch.Tensor, k_rope: torch.Tensor, up: UpProjections
) -> tuple[torch.Tensor, torch.Tensor]:
    """latent (m, latent_dim), k_rope (m, rope_dim) -> K (m, heads, nope_dim + rope_dim) and V
    (m, heads, v_head_dim)."""
    num_heads = up.w_uk.shape[0]
    by_head = latent.expand(num_heads, -1, -1)
    k_nope = torch.bmm(by_head, up.w_uk.transpose(1, 2)).transpose(0, 1)
    shared = k_rope.unsqueeze(1).expand(-1, num_heads, -1)
    v = torch.bmm(by_head, up.w_uv.transpose(1, 2)).transpose(0, 1)
    return torch.cat((k_nope, shared), dim=-1), v
