"""Attention without paging: the plainest AttentionDispatch, for tests of models.

Keeps the keys and values of every row densely, in float32, and recomputes softmax from its
definition. Independent of the pools and of every backend.
"""

from typing import Any

import torch

from attention import ForwardBatch
from attention.forward_batch import AttentionLayer


class DenseAttention:
    """Rows are told apart by req_pool_indices; a row's prefix is what it saved before."""

    def __init__(self) -> None:
        self._saved: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing is shared between the layers."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        out = q.new_empty(q.shape[0], q.shape[1], v.shape[2])
        begin = 0
        for row, slot in enumerate(forward_batch.req_pool_indices.tolist()):
            end = begin + int(forward_batch.extend_seq_lens_cpu[row])
            prefix_len = int(forward_batch.extend_prefix_lens_cpu[row])
            key = (layer.layer_id, slot)
            keys, values = k[begin:end].float(), v[begin:end].float()
            if prefix_len:
                old_keys, old_values = self._saved[key]
                keys = torch.cat((old_keys[:prefix_len], keys))
                values = torch.cat((old_values[:prefix_len], values))
            if save_kv_cache:
                self._saved[key] = (keys, values)
            out[begin:end] = attend_row(q[begin:end].float(), keys, values, layer)
            begin = end
        return out


def attend_row(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: Any
) -> torch.Tensor:
    """q (n, heads, d), the last n of m tokens; keys, values (m, kv_heads, d) -> (n, heads, dv)."""
    num_new, num_all, group = q.shape[0], keys.shape[0], q.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, keys) * layer.scaling
    if layer.logit_cap > 0:
        scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
    age = torch.arange(num_all - num_new, num_all).unsqueeze(1) - torch.arange(num_all)
    is_visible = age >= 0
    if layer.sliding_window_size > 0:
        is_visible &= age < layer.sliding_window_size
    scores = scores.masked_fill(~is_visible, float("-inf"))
    if layer.sinks is not None:
        sinks = layer.sinks.float().view(-1, 1, 1).expand(-1, num_new, 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., :num_all]
    return torch.einsum("hqk,khd->qhd", weights, values)
