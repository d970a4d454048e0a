"""Llama 4's text natively, cut over tensor-parallel ranks.

Module names are Hugging Face's, so that checkpoint names fall out of module paths. Knows no KV
memory: attention goes through RadixAttention.
"""

import torch
from torch import nn

from workers.layers.embedding import VocabParallelEmbedding
from workers.layers.norm import RMSNorm, unit_rms
from workers.layers.rotary import InterleavedRotaryEmbedding, RotaryEmbedding
from workers.layers.sharding import ShardContext
from workers.models.feed_forward import feed_forward
from workers.models.grouped_attention import GroupedQueryAttention, geometry_of
from workers.models.llama4_family import Llama4Spec
from workers.models.stream_decoder import StreamCausalLM


class NormedRotationAttention(GroupedQueryAttention):
    """That divides every query and key head by its root mean square once it is rotated."""

    def __init__(
        self, spec: Llama4Spec, layer_id: int, rotary: RotaryEmbedding, shard: ShardContext
    ) -> None:
        super().__init__(spec, spec.layers[layer_id], layer_id, rotary, shard)
        self._eps = spec.rms_norm_eps

    def inputs(
        self, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = super().inputs(positions, hidden)
        return unit_rms(q, self._eps), unit_rms(k, self._eps), v


class UnrotatedAttention(GroupedQueryAttention):
    """Without rotary positions, and with a temperature by position where the spec has one."""

    def __init__(
        self, spec: Llama4Spec, layer_id: int, rotary: RotaryEmbedding, shard: ShardContext
    ) -> None:
        super().__init__(spec, spec.layers[layer_id], layer_id, rotary, shard)
        self._temperature = spec.temperature

    def inputs(
        self, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v = self.qkv_proj(hidden).split(self.qkv_proj.split_sizes, dim=-1)
        if self._temperature is not None:
            q = self._temperature.scaled(q.unflatten(-1, (-1, self.head_dim)), positions)
        return q, k, v


def _attention(
    spec: Llama4Spec, layer_id: int, rotary: RotaryEmbedding, shard: ShardContext
) -> GroupedQueryAttention:
    if layer_id not in spec.rotated_layers:
        return UnrotatedAttention(spec, layer_id, rotary, shard)
    if spec.has_qk_norm:
        return NormedRotationAttention(spec, layer_id, rotary, shard)
    return GroupedQueryAttention(spec, spec.layers[layer_id], layer_id, rotary, shard)


class Llama4DecoderLayer(nn.Module):
    """Attention and feed-forward around one residual stream."""

    def __init__(
        self, spec: Llama4Spec, layer_id: int, rotary: RotaryEmbedding, shard: ShardContext
    ) -> None:
        super().__init__()
        self.self_attn = _attention(spec, layer_id, rotary, shard)
        self.feed_forward = feed_forward(spec, layer_id, shard)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)

    @property
    def mlp(self) -> nn.Module:
        """As StreamLayer.mlp, which checkpoints call feed_forward."""
        return self.feed_forward

    def finish(
        self, attended: torch.Tensor, residual: torch.Tensor, next_norm: RMSNorm
    ) -> torch.Tensor:
        """As StreamLayer.finish."""
        delta = self.self_attn.o_proj(attended)
        hidden = self.post_attention_layernorm.add_and_norm_(delta, residual)
        return next_norm.add_and_norm_(self.feed_forward(hidden), residual)


class Llama4Model(nn.Module):
    """Embedding, layers and final norm: what checkpoints call `model`."""

    def __init__(self, spec: Llama4Spec, num_positions: int, shard: ShardContext) -> None:
        super().__init__()
        rotary = InterleavedRotaryEmbedding(spec.rope, num_positions, shard.device)
        self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, shard)
        layers = [Llama4DecoderLayer(spec, i, rotary, shard) for i in range(len(spec.layers))]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)
        # Once more in plain tuples: registering them again would give the modules second names.
        self.decoder_layers = tuple(layers)
        # norms[i] precedes layer i, the last one follows the last layer.
        self.norms = (*(layer.input_layernorm for layer in layers), self.norm)


class Llama4ForCausalLM(StreamCausalLM):
    """The text of any member, with its language-model head.

    num_positions: longest context the rotary table covers, in tokens.
    """

    def __init__(self, spec: Llama4Spec, num_positions: int, shard: ShardContext) -> None:
        body = Llama4Model(spec, num_positions, shard)
        super().__init__(body, spec, shard, geometry_of(spec, shard))
        self._unread_prefixes = spec.unread_prefixes

    def is_redundant_weight(self, name: str) -> bool:
        """What sees images takes no part in text."""
        return name.startswith(self._unread_prefixes) or super().is_redundant_weight(name)
