"""The Llama family natively: Llama, Mistral, Qwen, GLM-4.5, gpt-oss and their mixtures of experts,
cut over tensor-parallel ranks.

Module names are Hugging Face's, so that checkpoint names fall out of module paths. The members'
differences are in LlamaFamilySpec; forward knows none of them. Knows no KV memory: attention goes
through RadixAttention.
"""

import torch
from torch import nn

from workers.layers.embedding import VocabParallelEmbedding
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RotaryEmbedding
from workers.layers.sharding import ShardContext
from workers.models.feed_forward import feed_forward
from workers.models.grouped_attention import (
    GroupedQueryAttention,
    QKNormAttention,
    SinkAttention,
    geometry_of,
)
from workers.models.llama_family import LlamaFamilySpec
from workers.models.stream_decoder import StreamCausalLM


def _attention_class(spec: LlamaFamilySpec) -> type[GroupedQueryAttention]:
    if spec.has_sinks:
        return SinkAttention
    return QKNormAttention if spec.has_qk_norm else GroupedQueryAttention


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward around one residual stream."""

    def __init__(
        self,
        spec: LlamaFamilySpec,
        layer_id: int,
        rotary: RotaryEmbedding,
        shard: ShardContext,
    ) -> None:
        super().__init__()
        attention_class = _attention_class(spec)
        self.self_attn = attention_class(spec, spec.layers[layer_id], layer_id, rotary, shard)
        self.mlp = feed_forward(spec, layer_id, shard)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)

    def finish(
        self, attended: torch.Tensor, residual: torch.Tensor, next_norm: RMSNorm
    ) -> torch.Tensor:
        """What follows the layer's attention -> next_norm of the stream after the layer.

        attended: (n, heads * head_dim). residual: the stream (n, hidden_size), in place.
        """
        delta = self.self_attn.o_proj(attended)
        hidden = self.post_attention_layernorm.add_and_norm_(delta, residual)
        return next_norm.add_and_norm_(self.mlp(hidden), residual)


class LlamaModel(nn.Module):
    """Embedding, layers and final norm: what checkpoints call `model`."""

    def __init__(self, spec: LlamaFamilySpec, num_positions: int, shard: ShardContext) -> None:
        super().__init__()
        rotary = RotaryEmbedding(spec.rope, num_positions, shard.device)
        self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, shard)
        layers = [
            LlamaDecoderLayer(spec, layer_id, rotary, shard) for layer_id in range(len(spec.layers))
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)
        # Once more in plain tuples: registering them again would give the modules second names.
        self.decoder_layers = tuple(layers)
        # norms[i] precedes layer i, the last one follows the last layer.
        self.norms = (*(layer.input_layernorm for layer in layers), self.norm)


class LlamaForCausalLM(StreamCausalLM):
    """Any member of the family, with its language-model head.

    num_positions: longest context the rotary table covers, in tokens.
    """

    def __init__(self, spec: LlamaFamilySpec, num_positions: int, shard: ShardContext) -> None:
        body = LlamaModel(spec, num_positions, shard)
        super().__init__(body, spec, shard, geometry_of(spec, shard))
        last = len(spec.layers)
        self._extra_layers = tuple(
            f"model.layers.{last + index}." for index in range(spec.num_extra_layers)
        )

    def is_redundant_weight(self, name: str) -> bool:
        """Layers for multi-token prediction take no part in plain decoding."""
        return name.startswith(self._extra_layers) or super().is_redundant_weight(name)
