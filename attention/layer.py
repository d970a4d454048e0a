"""RadixAttention: the module every transformer layer calls. Implements no kernel, it dispatches."""

from __future__ import annotations

import torch
from torch import nn

from attention.forward_batch import ForwardBatch
from attention.qkv_projection import QKVProjection


class RadixAttention(nn.Module):
    """Causal attention of one layer over the paged pool.

    Source of the name and of the fields: SGLang's layer of the same name, described in the seed
    documents. tp_q_head_num and tp_k_head_num count this rank's heads.

    sliding_window_size: number of most recent keys a query sees, itself included; -1 means all.
    sinks: float (tp_q_head_num,) extra logits of the softmax denominator, or None.
    chunk_size: a query sees the keys since its chunk of so many positions began; -1 means all.
    stores_kv: false where the layer reads the K and V of another one, as its config says.
    """

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        scaling: float,
        num_kv_heads: int,
        layer_id: int,
        *,
        v_head_dim: int = -1,
        logit_cap: float = 0.0,
        sliding_window_size: int = -1,
    ) -> None:
        super().__init__()
        self.tp_q_head_num = num_heads
        self.tp_k_head_num = num_kv_heads
        self.head_dim = head_dim
        self.v_head_dim = head_dim if v_head_dim == -1 else v_head_dim
        self.scaling = scaling
        self.layer_id = layer_id
        self.logit_cap = logit_cap
        self.sliding_window_size = sliding_window_size
        self.sinks: torch.Tensor | None = None
        self.chunk_size = -1
        self.stores_kv = True

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Attend the new tokens to their rows' cached and new keys.

        q: (num_tokens, tp_q_head_num * head_dim); k: (num_tokens, tp_k_head_num * head_dim);
        v: (num_tokens, tp_k_head_num * v_head_dim); any view with these element counts will do.
        Returns (num_tokens, tp_q_head_num * v_head_dim) in q's dtype. Writes k and v to the pool
        at forward_batch.out_cache_loc first unless save_kv_cache or stores_kv is false.
        """
        num_tokens = forward_batch.num_tokens
        q = q.view(num_tokens, self.tp_q_head_num, self.head_dim)
        k = k.view(num_tokens, self.tp_k_head_num, self.head_dim)
        v = v.view(num_tokens, self.tp_k_head_num, self.v_head_dim)
        saves = save_kv_cache and self.stores_kv
        out = forward_batch.attn_backend.forward(q, k, v, self, forward_batch, saves)
        return out.view(num_tokens, self.tp_q_head_num * self.v_head_dim)

    def forward_projected(
        self, projection: QKVProjection, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """A decode step whose backend rotates and caches too: see fuses_decode_projection.

        Returns (num_tokens, tp_q_head_num * v_head_dim).
        """
        out = forward_batch.attn_backend.forward_projected(projection, self, forward_batch)
        return out.view(forward_batch.num_tokens, self.tp_q_head_num * self.v_head_dim)
