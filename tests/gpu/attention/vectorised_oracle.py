"""The float64 oracle with all heads and queries of a row at once: the same numbers, faster."""

from __future__ import annotations

import torch

from attention.forward_batch import AttentionLayer
from attention.oracle import OracleBackend


class VectorisedOracleBackend(OracleBackend):
    """A test on the CPU holds it to the slow oracle."""

    @staticmethod
    def _attend_row(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
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
        logits.masked_fill_(is_hidden, -torch.inf)
        if layer.sinks is not None:
            sinks = layer.sinks.double()[:, None, None].expand(-1, num_queries, 1)
            logits = torch.cat([logits, sinks], dim=2)
        weights = torch.softmax(logits, dim=2)[:, :, :num_keys]
        values = v.double().repeat_interleave(group, dim=1)
        out.copy_(torch.einsum("hqk,khd->qhd", weights, values))
