"""The Llama family natively: Llama 2 and 3, Mistral, Qwen2, Qwen3, cut over tensor-parallel ranks.

Module names are Hugging Face's, so that checkpoint names fall out of module paths. The members'
differences are in LlamaFamilySpec; forward knows none of them. Knows no KV memory: attention goes
through RadixAttention.
"""

import torch
from torch import nn

from attention import ForwardBatch, LayerAttentionConfig, RadixAttention
from workers.layers.embedding import ParallelLMHead, TiedLMHead, VocabParallelEmbedding
from workers.layers.gated_mlp import GatedMLP
from workers.layers.linear import QKVParallelLinear, RowParallelLinear
from workers.layers.norm import RMSNorm
from workers.layers.rotary import RotaryEmbedding
from workers.layers.sharding import KVHeadShard, ShardContext, divide
from workers.models.base import AttentionGeometry, NativeCausalLM
from workers.models.llama_family import LlamaFamilySpec


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions. (n, hidden_size) -> (n, hidden_size)."""

    def __init__(
        self,
        spec: LlamaFamilySpec,
        layer: LayerAttentionConfig,
        layer_id: int,
        rotary: RotaryEmbedding,
        shard: ShardContext,
    ) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.rotary = rotary
        self.qkv_proj = QKVParallelLinear(
            spec.hidden_size,
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
            spec.head_dim**-0.5,
            self.qkv_proj.tp_k_head_num,
            layer_id,
            logit_cap=layer.logit_cap,
            sliding_window_size=layer.sliding_window_size,
        )

    def normalise_heads(
        self, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """q, k (n, heads, head_dim) as they are rotated: here, as projected."""
        return q, k

    def forward(
        self, positions: torch.Tensor, hidden: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        q, k, v = self.qkv_proj(hidden).split(self.qkv_proj.split_sizes, dim=-1)
        q, k = self.normalise_heads(
            q.unflatten(-1, (-1, self.head_dim)), k.unflatten(-1, (-1, self.head_dim))
        )
        q, k = self.rotary(positions, q, k)
        out: torch.Tensor = self.o_proj(self.attn(q, k, v, forward_batch))
        return out


class QKNormAttention(LlamaAttention):
    """LlamaAttention that normalises every query and key head before the rotation (Qwen3)."""

    def __init__(
        self,
        spec: LlamaFamilySpec,
        layer: LayerAttentionConfig,
        layer_id: int,
        rotary: RotaryEmbedding,
        shard: ShardContext,
    ) -> None:
        super().__init__(spec, layer, layer_id, rotary, shard)
        self.q_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, shard)
        self.k_norm = RMSNorm(spec.head_dim, spec.rms_norm_eps, shard)

    def normalise_heads(
        self, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q_norm(q), self.k_norm(k)


class LlamaDecoderLayer(nn.Module):
    """Attention and feed-forward around one residual stream.

    Takes its input already normalised and leaves its last output unadded: the caller fuses that
    addition with the next layer's norm.
    """

    def __init__(
        self,
        spec: LlamaFamilySpec,
        layer_id: int,
        rotary: RotaryEmbedding,
        shard: ShardContext,
    ) -> None:
        super().__init__()
        attention_class = QKNormAttention if spec.has_qk_norm else LlamaAttention
        self.self_attn = attention_class(spec, spec.layers[layer_id], layer_id, rotary, shard)
        self.mlp = GatedMLP(spec.hidden_size, spec.intermediate_size, spec.has_mlp_bias, shard)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)

    def forward(
        self,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden: normalised input, residual: the stream, both (n, hidden_size) -> (delta, stream).

        The stream after this layer is their sum.
        """
        attended = self.self_attn(positions, hidden, forward_batch)
        hidden, residual = self.post_attention_layernorm.add_and_norm(attended, residual)
        return self.mlp(hidden), residual


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
        # norms[i] precedes layer i, the last one follows the last layer. A plain tuple: registering
        # the norms here again would give them second names.
        self._norms = (*(layer.input_layernorm for layer in layers), self.norm)

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        residual = self.embed_tokens(input_ids)
        hidden = self._norms[0](residual)
        for layer, next_norm in zip(self.layers, self._norms[1:], strict=True):
            delta, residual = layer(positions, hidden, residual, forward_batch)
            hidden, residual = next_norm.add_and_norm(delta, residual)
        normed: torch.Tensor = hidden
        return normed


class LlamaForCausalLM(NativeCausalLM):
    """Any member of the family, with its language-model head.

    num_positions: longest context the rotary table covers, in tokens.
    """

    def __init__(self, spec: LlamaFamilySpec, num_positions: int, shard: ShardContext) -> None:
        super().__init__()
        self.vocab_size = spec.vocab_size
        self.model = LlamaModel(spec, num_positions, shard)
        self.lm_head: nn.Module = (
            TiedLMHead(self.model.embed_tokens)
            if spec.has_tied_embeddings
            else ParallelLMHead(spec.vocab_size, spec.hidden_size, shard)
        )
        self.tied_weights = (
            {"lm_head.weight": "model.embed_tokens.weight"} if spec.has_tied_embeddings else {}
        )
        self.geometry = AttentionGeometry(
            tp_q_head_num=divide(spec.num_q_heads, shard.tp.size, "num_attention_heads"),
            tp_k_head_num=KVHeadShard.of_rank(
                spec.num_kv_heads, shard.tp.rank, shard.tp.size
            ).num_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.head_dim,
            layers=spec.layers,
        )

    def forward(
        self, input_ids: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.model(input_ids, positions, forward_batch)
        return hidden

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def is_redundant_weight(self, name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq")
