"""Grouped-query attention whose output is gated, head by head (Qwen3-Next).

Knows no KV memory: attention goes through RadixAttention.
"""

import torch
from torch import nn

from attention import ForwardBatch, RadixAttention
from workers.layers.linear import QKVParallelLinear, RowParallelLinear
from workers.layers.norm import UnitOffsetRMSNorm
from workers.layers.rotary import RotaryEmbedding
from workers.layers.sharding import ShardContext
from workers.models.grouped_attention import AttentionSpec


class GatedAttention(nn.Module):
    """q_proj gives of every head its query, then its gate. layer_id: among layers that attend."""

    def __init__(
        self, spec: AttentionSpec, layer_id: int, rotary: RotaryEmbedding, shard: ShardContext
    ) -> None:
        super().__init__()
        self.head_dim, self.rotary = spec.head_dim, rotary
        self.qkv_proj = QKVParallelLinear(
            spec.hidden_size,
            2 * spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.has_qkv_bias,
            shard,
        )
        self.q_norm = UnitOffsetRMSNorm(spec.head_dim, spec.rms_norm_eps, shard)
        self.k_norm = UnitOffsetRMSNorm(spec.head_dim, spec.rms_norm_eps, shard)
        q_size = spec.num_q_heads * spec.head_dim
        self.o_proj = RowParallelLinear(q_size, spec.hidden_size, spec.has_o_bias, shard)
        self.attn = RadixAttention(
            self.qkv_proj.tp_q_head_num // 2,
            spec.head_dim,
            spec.scaling,
            self.qkv_proj.tp_k_head_num,
            layer_id,
        )

    def attended(
        self, hidden: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """As StreamAttention.attended."""
        q_gate, k, v = self.qkv_proj(hidden).split(self.qkv_proj.split_sizes, dim=-1)
        q, gate = q_gate.unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, dim=-1)
        q, k = self.q_norm(q), self.k_norm(k.unflatten(-1, (-1, self.head_dim)))
        out: torch.Tensor = self.attn(*self.rotary(positions, q, k), v, forward_batch)
        return out * torch.sigmoid(gate.flatten(1))
