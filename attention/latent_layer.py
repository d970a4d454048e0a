"""LatentAttention: what RadixAttention is to models with multi-head latent attention.

Implements no kernel, it dispatches: which of the two forms a step takes, heads absorbed into the
query or K and V of every head, is the backend's choice.
"""

from __future__ import annotations

import torch
from torch import nn

from attention.forward_batch import ForwardBatch
from attention.latent_inputs import LatentTokens, UpProjections
from attention.memory.layout import LatentEntry


class LatentAttention(nn.Module):
    """Causal attention of one layer over the latents of a paged pool.

    num_heads: of this rank. scaling: of the scores, the model's own factor on long contexts in it.
    """

    def __init__(
        self, num_heads: int, v_head_dim: int, entry: LatentEntry, scaling: float, layer_id: int
    ) -> None:
        super().__init__()
        self.tp_q_head_num = num_heads
        self.v_head_dim = v_head_dim
        self.entry = entry
        self.scaling = scaling
        self.layer_id = layer_id

    def forward(
        self, tokens: LatentTokens, up: UpProjections, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Attend the new tokens to their rows' cached and new tokens.

        Returns (num_tokens, tp_q_head_num * v_head_dim) in q_nope's dtype. Writes the new latents
        to the pool at forward_batch.out_cache_loc first. Raises AttentionBackendError where the
        backend attends over heads only.
        """
        out = forward_batch.attn_backend.forward_latent(tokens, up, self, forward_batch)
        return out.flatten(1)
