"""Attention of a run of new tokens over one row's keys in plain torch, block by block.

Blocks of queries bound the memory of masks and scores and skip the keys that causality or the
window hides from a whole block. Knows no batch, no pool: K and V come in as one row's tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn import functional

from attention.forward_batch import AttentionLayer
from attention.kernels.torch_scores import capped_sink_softmax
from attention.memory.layout import CurrentChunk, Retention

QUERY_BLOCK = 128
_VECTOR_BYTES = 16


@dataclass(frozen=True, slots=True)
class QueryBlock:
    """New tokens first_query .. stop_query - 1 of a row, and the range of keys any of them sees."""

    first_query: int
    stop_query: int
    first_key: int
    stop_key: int


def query_blocks(num_queries: int, num_keys: int, retention: Retention) -> Iterator[QueryBlock]:
    """Cut a row's queries into blocks; query i stands at key num_keys - num_queries + i.

    Leading keys that no query sees may be left out of num_keys, of chunks only whole ones. A block
    lies within one chunk, so that causality is all that hides keys of its range.
    """
    prefix_len = num_keys - num_queries
    first = 0
    while first < num_queries:
        position = prefix_len + first
        stop = min(first + QUERY_BLOCK, num_queries)
        if isinstance(retention, CurrentChunk):
            stop = min(stop, first + retention.num_tokens - position % retention.num_tokens)
        yield QueryBlock(first, stop, retention.first_visible(position), prefix_len + stop)
        first = stop


def all_key_blocks(num_queries: int, num_keys: int) -> Iterator[QueryBlock]:
    """Cut a row's queries into blocks any of which may see every key."""
    for first in range(0, num_queries, QUERY_BLOCK):
        yield QueryBlock(first, min(first + QUERY_BLOCK, num_queries), 0, num_keys)


class BlockBias(Protocol):
    """Which keys of a block its queries see."""

    def block(self, block: QueryBlock) -> torch.Tensor | None:
        """0 or -inf, (queries, keys) of the block; None where each sees them all."""
        ...


class CausalBias:
    """Additive causal masks of one window, as views of one band matrix.

    Visibility depends only on how far a key lies behind the query, so one matrix of QUERY_BLOCK
    rows serves every block of every row; it grows with the longest reach asked for. On a GPU a view
    that does not start at a vector's boundary is copied.
    """

    def __init__(self, window: int, dtype: torch.dtype, device: torch.device) -> None:
        self._window = window
        self._dtype = dtype
        self._device = device
        self._reach = 0
        self._band = self._build(0)

    def block(self, block: QueryBlock) -> torch.Tensor:
        """0 or -inf, (queries, keys) of a block whose last query stands at its last key."""
        num_queries = block.stop_query - block.first_query
        num_keys = block.stop_key - block.first_key
        num_before = num_keys - num_queries
        if num_before > self._reach:
            self._reach = max(num_before, 2 * self._reach)
            self._band = self._build(self._reach)
        start = self._reach - num_before
        view = self._band[:num_queries, start : start + num_keys]
        # GPU kernels read masks in vectors of this size, and torch checks strides, not addresses.
        is_aligned = start * self._band.itemsize % _VECTOR_BYTES == 0
        return view if is_aligned or self._device.type == "cpu" else view.clone()

    def _build(self, reach: int) -> torch.Tensor:
        """Column c stands for the key c - reach positions after the block's first query."""
        with torch.inference_mode(False):
            queries = torch.arange(QUERY_BLOCK, device=self._device).view(-1, 1)
            keys = torch.arange(reach + QUERY_BLOCK, device=self._device).view(1, -1) - reach
            hidden = keys > queries
            if self._window >= 0:
                hidden |= keys <= queries - self._window
            band = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
            return band.masked_fill_(hidden, -torch.inf)


class NoBias:
    """In CausalBias's place where every query sees every key."""

    def block(self, block: QueryBlock) -> None:
        return None


def sdpa_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    layer: AttentionLayer,
) -> torch.Tensor:
    """q (n, q_heads, head_dim), k (m, kv_heads, head_dim), v (m, kv_heads, v_head_dim), bias (n, m)
    or None -> (n, q_heads, v_head_dim). For layers without logit cap and sinks.

    KV heads play the batch and the queries of a group the heads, so that no key is repeated.
    """
    grouped = _by_group(q, layer)
    shape = (-1, grouped.shape[1], -1, -1)
    out = functional.scaled_dot_product_attention(
        grouped,
        k.transpose(0, 1).unsqueeze(1).expand(shape),
        v.transpose(0, 1).unsqueeze(1).expand(shape),
        attn_mask=bias,
        scale=layer.scaling,
    )
    return out.permute(2, 0, 1, 3).flatten(1, 2)


def explicit_block(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
    layer: AttentionLayer,
) -> torch.Tensor:
    """As sdpa_block, with logit cap and sinks, scores in float32."""
    num_queries, kv_heads = q.shape[0], layer.tp_k_head_num
    grouped = _by_group(q, layer).float()
    keys = k.permute(1, 2, 0).float()
    scores = torch.bmm(grouped.reshape(kv_heads, -1, q.shape[2]), keys).mul_(layer.scaling)
    scores = scores.view(kv_heads, -1, num_queries, k.shape[0])
    sinks = None if layer.sinks is None else layer.sinks.float().view(kv_heads, -1, 1, 1)
    weights = capped_sink_softmax(scores, bias, layer.logit_cap, sinks)
    out = torch.bmm(weights.view(kv_heads, -1, k.shape[0]), v.transpose(0, 1).float())
    out = out.view(kv_heads, -1, num_queries, v.shape[2])
    return out.permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)


def _by_group(q: torch.Tensor, layer: AttentionLayer) -> torch.Tensor:
    """(n, q_heads, head_dim) -> (kv_heads, group, n, head_dim), a view."""
    num_queries, q_heads, head_dim = q.shape
    kv_heads = layer.tp_k_head_num
    return q.view(num_queries, kv_heads, q_heads // kv_heads, head_dim).permute(1, 2, 0, 3)
