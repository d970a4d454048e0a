"""DeepSeek-V2 and V3 and their kin natively: latent attention, cut over tensor-parallel ranks.

Module names are Hugging Face's, so that checkpoint names fall out of module paths. Heads and
experts are cut over ranks, latents are computed by all of them. Knows no KV memory: attention goes
through LatentAttention.
"""

from abc import ABC, abstractmethod

import torch
from torch import nn

from attention import (
    ForwardBatch,
    LatentAttention,
    LatentTokens,
    LayerAttentionConfig,
    UpProjections,
)
from attention.capability import AttentionBackendError
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.layers.embedding import VocabParallelEmbedding
from workers.layers.linear import ColumnParallelLinear, RowParallelLinear
from workers.layers.norm import RMSNorm
from workers.layers.replicated import ReplicatedLinear
from workers.layers.rotary import InterleavedRotaryEmbedding, RotaryEmbedding
from workers.layers.sharding import ShardContext, divide
from workers.models.base import AttentionGeometry
from workers.models.deepseek_family import DeepseekSpec
from workers.models.feed_forward import feed_forward
from workers.models.stream_decoder import StreamCausalLM


class DeepseekAttention(nn.Module, ABC):
    """Multi-head latent attention of one layer but for the queries and for norms around it."""

    def __init__(
        self, spec: DeepseekSpec, layer_id: int, rotary: RotaryEmbedding, shard: ShardContext
    ) -> None:
        super().__init__()
        self._num_heads = divide(spec.num_heads, shard.tp.size, "num_attention_heads")
        self._nope_dim, self._qk_head_dim = spec.nope_dim, spec.qk_head_dim
        self.rotary = rotary
        hidden, entry, bias = spec.hidden_size, spec.entry, spec.has_attention_bias
        self.kv_a_proj_with_mqa = ReplicatedLinear(hidden, entry.elements_per_token, bias, shard)
        self.kv_a_layernorm = RMSNorm(entry.latent_dim, spec.latent_norm_eps, shard)
        up_rows = spec.num_heads * (spec.nope_dim + spec.v_head_dim)
        self.kv_b_proj = ColumnParallelLinear(entry.latent_dim, up_rows, False, shard)
        self.o_proj = RowParallelLinear(spec.num_heads * spec.v_head_dim, hidden, bias, shard)
        self.attn = LatentAttention(self._num_heads, spec.v_head_dim, entry, spec.scaling, layer_id)

    @property
    @abstractmethod
    def first_query_weight(self) -> nn.Parameter:
        """What queries begin with: (its width, hidden_size)."""

    @abstractmethod
    def project_queries(self, hidden: torch.Tensor) -> torch.Tensor:
        """(n, hidden_size) -> (n, this rank's heads * qk_head_dim)."""

    def attended(
        self, hidden: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """As StreamAttention.attended."""
        q = self.project_queries(hidden).view(-1, self._num_heads, self._qk_head_dim)
        q_nope, q_rope = q.tensor_split((self._nope_dim,), dim=-1)
        latent, k_rope = self._compressed(hidden)
        q_rope, k_rope = self.rotary(positions, q_rope, k_rope)
        tokens = LatentTokens(q_nope, q_rope, latent, k_rope.squeeze(1))
        out: torch.Tensor = self.attn(tokens, self.up_projections(), forward_batch)
        return out

    def keep(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache_indices: torch.Tensor,
        pool: TokenToKVPool,
    ) -> None:
        """As GroupedQueryAttention.keep. Raises AttentionBackendError for a pool of no latents."""
        if not isinstance(pool, LatentTokenToKVPool):
            raise AttentionBackendError(f"latents are not kept in a {type(pool).__name__}")
        latent, k_rope = self._compressed(hidden)
        _, k_rope = self.rotary(positions, k_rope[:, :0], k_rope)
        pool.set_latent(self.attn.layer_id, cache_indices, latent, k_rope.squeeze(1))

    def _compressed(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Normalised latents (n, latent_dim) and their keys before rotation, (n, 1, rope_dim)."""
        compressed = self.kv_a_proj_with_mqa(hidden)
        latent, k_rope = compressed.tensor_split((self.attn.entry.latent_dim,), dim=-1)
        return self.kv_a_layernorm(latent), k_rope.unsqueeze(1)

    def up_projections(self) -> UpProjections:
        """Views of kv_b_proj."""
        by_head = self.kv_b_proj.weight.view(self._num_heads, -1, self.attn.entry.latent_dim)
        return UpProjections(by_head[:, : self._nope_dim], by_head[:, self._nope_dim :])


class DirectQueryAttention(DeepseekAttention):
    """Queries from the hidden states at once (DeepSeek-V2-Lite)."""

    def __init__(
        self, spec: DeepseekSpec, layer_id: int, rotary: RotaryEmbedding, shard: ShardContext
    ) -> None:
        super().__init__(spec, layer_id, rotary, shard)
        q_size = spec.num_heads * spec.qk_head_dim
        self.q_proj = ColumnParallelLinear(spec.hidden_size, q_size, False, shard)

    @property
    def first_query_weight(self) -> nn.Parameter:
        return self.q_proj.weight

    def project_queries(self, hidden: torch.Tensor) -> torch.Tensor:
        q: torch.Tensor = self.q_proj(hidden)
        return q


class LowRankQueryAttention(DeepseekAttention):
    """Queries by way of a compressed vector of rank elements (DeepSeek-V2 and V3)."""

    def __init__(
        self,
        spec: DeepseekSpec,
        rank: int,
        layer_id: int,
        rotary: RotaryEmbedding,
        shard: ShardContext,
    ) -> None:
        super().__init__(spec, layer_id, rotary, shard)
        q_size = spec.num_heads * spec.qk_head_dim
        self.q_a_proj = ReplicatedLinear(spec.hidden_size, rank, spec.has_attention_bias, shard)
        self.q_a_layernorm = RMSNorm(rank, spec.latent_norm_eps, shard)
        self.q_b_proj = ColumnParallelLinear(rank, q_size, False, shard)

    @property
    def first_query_weight(self) -> nn.Parameter:
        return self.q_a_proj.weight

    def project_queries(self, hidden: torch.Tensor) -> torch.Tensor:
        q: torch.Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(hidden)))
        return q


def _attention(
    spec: DeepseekSpec, layer_id: int, rotary: RotaryEmbedding, shard: ShardContext
) -> DeepseekAttention:
    if spec.q_lora_rank is None:
        return DirectQueryAttention(spec, layer_id, rotary, shard)
    return LowRankQueryAttention(spec, spec.q_lora_rank, layer_id, rotary, shard)


class DeepseekDecoderLayer(nn.Module):
    """Attention and feed-forward around one residual stream, as LlamaDecoderLayer."""

    def __init__(
        self,
        spec: DeepseekSpec,
        layer_id: int,
        rotary: RotaryEmbedding,
        shard: ShardContext,
    ) -> None:
        super().__init__()
        self.self_attn = _attention(spec, layer_id, rotary, shard)
        self.mlp = feed_forward(spec, layer_id, shard)
        self.input_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)

    def finish(
        self, attended: torch.Tensor, residual: torch.Tensor, next_norm: RMSNorm
    ) -> torch.Tensor:
        """As StreamLayer.finish."""
        delta = self.self_attn.o_proj(attended)
        hidden = self.post_attention_layernorm.add_and_norm_(delta, residual)
        return next_norm.add_and_norm_(self.mlp(hidden), residual)


class DeepseekModel(nn.Module):
    """Embedding, layers and final norm: what checkpoints call `model`."""

    def __init__(self, spec: DeepseekSpec, num_positions: int, shard: ShardContext) -> None:
        super().__init__()
        rotary_class = InterleavedRotaryEmbedding if spec.is_interleaved else RotaryEmbedding
        rotary = rotary_class(spec.rope, num_positions, shard.device)
        self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, shard)
        layers = [
            DeepseekDecoderLayer(spec, layer_id, rotary, shard)
            for layer_id in range(spec.num_layers)
        ]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)
        # Once more in plain tuples: registering them again would give the modules second names.
        self.decoder_layers = tuple(layers)
        # norms[i] precedes layer i, the last one follows the last layer.
        self.norms = (*(layer.input_layernorm for layer in layers), self.norm)


class DeepseekForCausalLM(StreamCausalLM):
    """Any member of the family, with its language-model head.

    num_positions: longest context the rotary table covers, in tokens.
    """

    def __init__(self, spec: DeepseekSpec, num_positions: int, shard: ShardContext) -> None:
        num_heads = divide(spec.num_heads, shard.tp.size, "num_attention_heads")
        geometry = AttentionGeometry(
            tp_q_head_num=num_heads,
            tp_k_head_num=num_heads,
            head_dim=spec.qk_head_dim,
            v_head_dim=spec.v_head_dim,
            layers=(LayerAttentionConfig(),) * spec.num_layers,
            latent=spec.entry,
        )
        super().__init__(DeepseekModel(spec, num_positions, shard), spec, shard, geometry)
        self._extra_layers = tuple(
            f"model.layers.{spec.num_layers + index}." for index in range(spec.num_extra_layers)
        )

    def is_redundant_weight(self, name: str) -> bool:
        """Layers for multi-token prediction take no part in plain decoding."""
        return name.startswith(self._extra_layers) or super().is_redundant_weight(name)
