"""The float64 oracle with all heads and queries of a row at once: the same numbers, faster."""

from __future__ import annotations

import torch

from attention import LayerAttentionConfig
from attention.forward_batch import AttentionLayer
from attention.kernels.torch_extend import QueryBlock
from attention.kernels.torch_visible import SeenRow, VisibleBias
from attention.memory.layout import FixedLength
from attention.oracle import OracleBackend
from attention.oracle_visibility import OracleRow
from attention.visibility import Causal, Everything, Items, Tree, Visibility


class VectorisedOracleBackend(OracleBackend):
    """A test on the CPU holds it to the slow oracle."""

    @staticmethod
    def _seen(visibility: Visibility, row: OracleRow, layer: AttentionLayer) -> torch.Tensor:
        num_keys, num_new = len(row.positions), len(row.positions) - row.prefix_len
        positions = torch.tensor(row.positions[row.prefix_len :], dtype=torch.int64)
        own = SeenRow(row.first_token, row.first_cell, 0, row.prefix_len, num_new, positions)
        retention = LayerAttentionConfig(
            sliding_window_size=layer.sliding_window_size, chunk_size=layer.chunk_size
        ).retention
        assert not isinstance(visibility, Causal)
        assert not isinstance(retention, FixedLength)
        on_host = _on_host(visibility)
        bias = VisibleBias(own, on_host, retention, torch.float64)
        return bias.seen(QueryBlock(0, num_new, 0, num_keys))

    @staticmethod
    def _attend_row(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        seen: torch.Tensor | None,
    ) -> None:
        num_queries, num_keys = q.shape[0], k.shape[0]
        group = layer.tp_q_head_num // layer.tp_k_head_num
        keys = k.double().repeat_interleave(group, dim=1)
        logits = torch.einsum("qhd,khd->hqk", q.double(), keys) * layer.scaling
        if layer.logit_cap > 0.0:
            logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        key = torch.arange(num_keys, device=q.device)
        query = torch.arange(num_queries, device=q.device)[:, None] + num_keys - num_queries
        is_hidden = key > query
        if layer.sliding_window_size >= 0:
            is_hidden |= key <= query - layer.sliding_window_size
        if layer.chunk_size > 0:
            is_hidden |= key < query // layer.chunk_size * layer.chunk_size
        logits.masked_fill_(is_hidden if seen is None else ~seen, -torch.inf)
        if layer.sinks is not None:
            sinks = layer.sinks.double()[:, None, None].expand(-1, num_queries, 1)
            logits = torch.cat([logits, sinks], dim=2)
        weights = torch.softmax(logits, dim=2)[:, :, :num_keys]
        values = v.double().repeat_interleave(group, dim=1)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, values))


def _on_host(visibility: Tree | Items | Everything) -> Tree | Items | Everything:
    match visibility:
        case Tree(mask=mask, starts=starts):
            return Tree(mask.cpu(), starts.cpu())
        case Items(shared_keys=shared, first_own=own):
            return Items(shared.cpu(), own.cpu())
        case Everything():
            return visibility
