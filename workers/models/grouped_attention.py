"""Grouped-query attention with rotary positions, as the layers of plain decoders have it.

Knows no KV memory: attention goes through RadixAttention.
"""

from collections.abc import Mapping
from typing import ClassVar, Protocol

import torch
from torch import nn

from attention import ForwardBatch, LayerAttentionConfig, RadixAttention
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.qkv_projection import HeadNorm
from workers.layers.linear import QKVParallelLinear, RowParallelLinear
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RotaryEmbedding
from workers.layers.sharding import (
    FusedLayer,
    KVHeadShard,
    ShardContext,
    TensorSource,
    copy_slice,
    divide,
)
from workers.models.base import AttentionGeometry


class AttentionSpec(Protocol):
    """What a family's spec says of all its layers. scaling: factor of the scores."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def num_q_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def rms_norm_eps(self) -> float: ...
    @property
    def has_qkv_bias(self) -> bool: ...
    @property
    def has_o_bias(self) -> bool: ...
    @property
    def scaling(self) -> float: ...
    @property
    def layers(self) -> tuple[LayerAttentionConfig, ...]: ...


def geometry_of(spec: AttentionSpec, shard: ShardContext) -> AttentionGeometry:
    """This rank's heads."""
    tp = shard.tp
    return AttentionGeometry(
        tp_q_head_num=divide(spec.num_q_heads, tp.size, "num_attention_heads"),
        tp_k_head_num=KVHeadShard.of_rank(spec.num_kv_heads, tp.rank, tp.size).num_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.head_dim,
        layers=spec.layers,
    )


class GroupedQueryAttention(nn.Module):
    """Attention of one layer but for its norms. num_input_states: of hidden_size, which a token
    brings side by side."""

    num_input_states: ClassVar[int] = 1

    def __init__(
        self,
        spec: AttentionSpec,
        layer: LayerAttentionConfig,
        layer_id: int,
        rotary: RotaryEmbedding,
        shard: ShardContext,
    ) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.rotary = rotary
        self.qkv_proj = QKVParallelLinear(
            self.num_input_states * spec.hidden_size,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.has_qkv_bias,
            shard,
        )
        q_size = spec.num_q_heads * spec.head_dim
        self.o_proj = RowParallelLinear(q_size, spec.hidden_size, spec.has_o_bias, shard)
        self.attn = RadixAttention(
            self.qkv_proj.tp_q_head_num,
            spec.head_dim,
            spec.scaling,
            self.qkv_proj.tp_k_head_num,
            layer_id,
            logit_cap=layer.logit_cap,
            sliding_window_size=layer.sliding_window_size,
        )
        self.attn.chunk_size = layer.chunk_size

    @property
    def head_norm(self) -> HeadNorm | None:
        """The norm of query and key heads, as kernels take it. Its weights are those of now."""
        return None

    def normalise_heads(
        self, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k (n, heads, head_dim) as they are rotated: here, as projected."""
        return q, k

    def inputs(
        self, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden: normalised input (n, hidden_size) -> q, k (n, heads, head_dim), v (n, width)."""
        q, k, v = self.qkv_proj(hidden).split(self.qkv_proj.split_sizes, dim=-1)
        q, k = self.normalise_heads(
            q.unflatten(-1, (-1, self.head_dim)), k.unflatten(-1, (-1, self.head_dim))
        )
        return *self.rotary(positions, q, k), v

    def attended(
        self, hidden: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """As StreamAttention.attended."""
        out: torch.Tensor = self.attn(*self.inputs(positions, hidden), forward_batch)
        return out

    def keep(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache_indices: torch.Tensor,
        pool: TokenToKVPool,
    ) -> None:
        """What attended would leave of tokens in the pool, at cache_indices int64 (n,); nothing
        attends."""
        _, k, v = self.inputs(positions, hidden)
        pool.set_kv_buffer(self.attn.layer_id, cache_indices, k, v.view(k.shape))


class HeadSinks(FusedLayer):
    """One learned logit of every query head that no value belongs to: (tp_q_head_num,)."""

    def __init__(self, num_heads: int, shard: ShardContext) -> None:
        super().__init__()
        self._num_heads = num_heads
        own = divide(num_heads, shard.tp.size, "num_attention_heads")
        self._own = slice(shard.tp.rank * own, (shard.tp.rank + 1) * own)
        self.logits = shard.empty_parameter(own)

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"sinks": (self._num_heads,)}

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        copy_slice(self.logits, tensor, self._own)


class SinkAttention(GroupedQueryAttention):
    """Whose heads may attend to nothing (gpt-oss)."""

    def __init__(
        self,
        spec: AttentionSpec,
        layer: LayerAttentionConfig,
        layer_id: int,
        rotary: RotaryEmbedding,
        shard: ShardContext,
    ) -> None:
        super().__init__(spec, layer, layer_id, rotary, shard)
        self.sinks = HeadSinks(spec.num_q_heads, shard)
        # The same memory: the parameter is filled later, and never replaced.
        self.attn.sinks = self.sinks.logits.data


class QKNormAttention(GroupedQueryAttention):
    """That normalises every query and key head before the rotation (Qwen3)."""

    norm_class: type[RMSNorm] = RMSNorm

    def __init__(
        self,
        spec: AttentionSpec,
        layer: LayerAttentionConfig,
        layer_id: int,
        rotary: RotaryEmbedding,
        shard: ShardContext,
    ) -> None:
        super().__init__(spec, layer, layer_id, rotary, shard)
        self.q_norm = self.norm_class(spec.head_dim, spec.rms_norm_eps, shard)
        self.k_norm = self.norm_class(spec.head_dim, spec.rms_norm_eps, shard)

    @property
    def head_norm(self) -> HeadNorm:
        return HeadNorm(self.q_norm.scale, self.k_norm.scale, self.q_norm.eps)

    def normalise_heads(
        self, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm(q), self.k_norm(k)
