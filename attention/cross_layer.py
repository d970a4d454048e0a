"""CrossAttention: what a decoder's layer calls to see what the encoder made of a request."""

from __future__ import annotations

import torch
from torch import nn

from attention.forward_batch import ForwardBatch


class CrossAttention(nn.Module):
    """Attention of one layer over its row's encoder tokens, all of them, whatever the position.

    The fields are RadixAttention's, as backends read them (AttentionLayer). K and V are in the
    encoder's account before the first token of their request; nothing is written here.
    """

    def __init__(
        self, num_heads: int, head_dim: int, scaling: float, num_kv_heads: int, layer_id: int
    ) -> None:
        super().__init__()
        self.tp_q_head_num = num_heads
        self.tp_k_head_num = num_kv_heads
        self.head_dim = head_dim
        self.v_head_dim = head_dim
        self.scaling = scaling
        self.layer_id = layer_id
        self.logit_cap = 0.0
        self.sliding_window_size = -1
        self.chunk_size = -1
        self.sinks: torch.Tensor | None = None

    def forward(self, q: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """q (num_tokens, tp_q_head_num * head_dim), any view of so many elements ->
        (num_tokens, tp_q_head_num * head_dim) in q's dtype."""
        num_tokens = forward_batch.num_tokens
        q = q.view(num_tokens, self.tp_q_head_num, self.head_dim)
        out = forward_batch.attn_backend.forward_cross(q, self, forward_batch)
        return out.view(num_tokens, self.tp_q_head_num * self.v_head_dim)
