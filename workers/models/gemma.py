"""Gemma 2 and Gemma 3 text natively, cut over tensor-parallel ranks.

Module names are Hugging Face's, so that checkpoint names fall out of module paths. What the members
differ in is in GemmaSpec; forward knows none of it. Knows no KV memory: attention goes through
RadixAttention.
"""

import torch
from torch import nn

from workers.layers.embedding import ScaledVocabParallelEmbedding
from workers.layers.gated_mlp import GeluGatedMLP
from workers.layers.norm import RMSNorm, UnitOffsetRMSNorm
from workers.layers.rotary import RotaryEmbedding
from workers.layers.sharding import ShardContext
from workers.models.gemma_family import GemmaSpec
from workers.models.grouped_attention import GroupedQueryAttention, QKNormAttention, geometry_of
from workers.models.stream_decoder import StreamCausalLM


class Gemma3Attention(QKNormAttention):
    """QKNormAttention with Gemma's norms."""

    norm_class = UnitOffsetRMSNorm


class GemmaDecoderLayer(nn.Module):
    """Attention and feed-forward around one residual stream, each between two norms."""

    def __init__(
        self, spec: GemmaSpec, layer_id: int, rotary: RotaryEmbedding, shard: ShardContext
    ) -> None:
        super().__init__()
        attention_class = Gemma3Attention if spec.has_qk_norm else GroupedQueryAttention
        self.self_attn: GroupedQueryAttention = attention_class(
            spec, spec.layers[layer_id], layer_id, rotary, shard
        )
        self.mlp = GeluGatedMLP(spec.hidden_size, spec.intermediate_size, False, shard)
        norm = spec.hidden_size, spec.rms_norm_eps, shard
        self.input_layernorm = UnitOffsetRMSNorm(*norm)
        self.post_attention_layernorm = UnitOffsetRMSNorm(*norm)
        self.pre_feedforward_layernorm = UnitOffsetRMSNorm(*norm)
        self.post_feedforward_layernorm = UnitOffsetRMSNorm(*norm)

    def finish(
        self, attended: torch.Tensor, residual: torch.Tensor, next_norm: RMSNorm
    ) -> torch.Tensor:
        """As StreamLayer.finish."""
        delta = self.post_attention_layernorm(self.self_attn.o_proj(attended))
        hidden = self.pre_feedforward_layernorm.add_and_norm_(delta, residual)
        delta = self.post_feedforward_layernorm(self.mlp(hidden))
        return next_norm.add_and_norm_(delta, residual)


class GemmaModel(nn.Module):
    """Embedding, layers and final norm: what checkpoints call `model`."""

    def __init__(self, spec: GemmaSpec, num_positions: int, shard: ShardContext) -> None:
        super().__init__()
        rotaries = {
            kind: RotaryEmbedding(rope, num_positions, shard.device)
            for kind, rope in spec.ropes.items()
        }
        self.embed_tokens = ScaledVocabParallelEmbedding(spec.vocab_size, spec.hidden_size, shard)
        layers = [
            GemmaDecoderLayer(spec, layer_id, rotaries[kind], shard)
            for layer_id, kind in enumerate(spec.layer_types)
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = UnitOffsetRMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)
        # Once more in plain tuples: registering them again would give the modules second names.
        self.decoder_layers = tuple(layers)
        # norms[i] precedes layer i, the last one follows the last layer.
        self.norms: tuple[RMSNorm, ...] = (
            *(layer.input_layernorm for layer in layers),
            self.norm,
        )


class GemmaForCausalLM(StreamCausalLM):
    """Any member of the family, with its language-model head.

    num_positions: longest context the rotary tables cover, in tokens.
    """

    def __init__(self, spec: GemmaSpec, num_positions: int, shard: ShardContext) -> None:
        body = GemmaModel(spec, num_positions, shard)
        super().__init__(body, spec, shard, geometry_of(spec, shard))
        self._logit_cap = spec.logit_cap
        self._unread_prefixes = spec.unread_prefixes

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().compute_logits(hidden)
        if self._logit_cap is None:
            return logits
        return torch.tanh(logits / self._logit_cap) * self._logit_cap

    def is_redundant_weight(self, name: str) -> bool:
        """What sees images takes no part in text."""
        return name.startswith(self._unread_prefixes) or super().is_redundant_weight(name)
