"""The Llama family natively: Llama 2 and 3, Mistral, Qwen2, Qwen3, cut over tensor-parallel ranks.

Module names are Hugging Face's, so that checkpoint names fall out of module paths. The members'
differences are in LlamaFamilySpec; forward knows none of them. Knows no KV memory: attention goes
through RadixAttention.
"""

import torch
from torch import nn

from workers.layers.embedding import VocabParallelEmbedding
from workers.layers.gated_mlp import GatedMLP
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RotaryEmbedding
from workers.layers.sharding import ShardContext
from workers.models.grouped_attention import GroupedQueryAttention, QKNormAttention
from workers.models.llama_family import LlamaFamilySpec
from workers.models.stream_decoder import StreamCausalLM


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
        attention_class = QKNormAttention if spec.has_qk_norm else GroupedQueryAttention
        self.self_attn = attention_class(spec, spec.layers[layer_id], layer_id, rotary, shard)
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, spec.has_mlp_bias, shard)
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
        super().__init__(LlamaModel(spec, num_positions, shard), spec, shard)
