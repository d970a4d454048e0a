"""The Llama family natively: Llama 2 and 3, Mistral, Qwen2, Qwen3, cut over tensor-parallel ranks.

Module names are Hugging Face's, so that checkpoint names fall out of module paths. The members'
differences are in LlamaFamilySpec; forward knows none of them. Knows no KV memory: attention goes
through RadixAttention.
"""

from collections.abc import Sequence

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
from workers.models.segmented import TokenPlaces
from workers.models.token_inputs import ModelOutput, TokenInputs


class LlamaAttention(nn.Module):
    """Grouped-query attention with rotary positions."""

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

    def inputs(
        self, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """hidden: normalised input (n, hidden_size) -> q, k (n, heads, head_dim), v (n, width)."""
        q, k, v = self.qkv_proj(hidden).split(self.qkv_proj.split_sizes, dim=-1)
        q, k = self.normalise_heads(
            q.unflatten(-1, (-1, self.head_dim)), k.unflatten(-1, (-1, self.head_dim))
        )
        return *self.rotary(positions, q, k), v


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
    """Attention and feed-forward around one residual stream."""

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


class LlamaForCausalLM(NativeCausalLM):
    """Any member of the family, with its language-model head.

    A step is begin, then for each layer attended and finish. num_positions: longest context the
    rotary table covers, in tokens.
    """

    def __init__(self, spec: LlamaFamilySpec, num_positions: int, shard: ShardContext) -> None:
        super().__init__()
        self.vocab_size = spec.vocab_size
        self.model = LlamaModel(spec, num_positions, shard)
        self._last = len(spec.layers) - 1
        self._tapped_layers: frozenset[int] = frozenset()
        self._decoder_layers, self._norms = self.model.decoder_layers, self.model.norms
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

    def forward(self, tokens: TokenInputs, forward_batch: ForwardBatch) -> ModelOutput:
        taps: list[torch.Tensor] = []
        attended, residual = self._up_to_last(tokens, forward_batch, taps)
        return ModelOutput(self.finish(self._last, attended, residual), tuple(taps))

    def forward_rows(
        self, tokens: TokenInputs, forward_batch: ForwardBatch, rows: torch.Tensor
    ) -> ModelOutput:
        """The last layer's keys and values are for everybody, the rest of it is for rows only."""
        taps: list[torch.Tensor] = []
        attended, residual = self._up_to_last(tokens, forward_batch, taps)
        return ModelOutput(self.finish_rows(attended, residual, rows), tuple(taps))

    def _up_to_last(
        self, tokens: TokenInputs, forward_batch: ForwardBatch, taps: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last layer's attention output and the stream that it joins. taps: filled."""
        places = TokenPlaces(tokens.positions, forward_batch.locs_by_account)
        residual, hidden = self.begin(tokens.ids)
        for layer in range(self._last):
            # In one expression: no name keeps the attention's output while the next one runs.
            hidden = self.finish(
                layer, self.attended(layer, hidden, places, forward_batch), residual
            )
            if layer in self._tapped_layers:
                taps.append(residual.clone())
        return self.attended(self._last, hidden, places, forward_batch), residual

    def tap_layers(self, layer_ids: Sequence[int]) -> None:
        unknown = sorted(set(layer_ids) - set(range(self._last)))
        if unknown:
            raise ValueError(f"layers {unknown} are not in [0, {self._last})")
        self._tapped_layers = frozenset(layer_ids)

    def begin(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream and the first layer's normalised input, both (n, hidden_size)."""
        residual = self.model.embed_tokens(input_ids)
        return residual, self._norms[0](residual)

    def attended(
        self, layer: int, hidden: torch.Tensor, places: TokenPlaces, batch: ForwardBatch
    ) -> torch.Tensor:
        """hidden: a layer's normalised input -> its attention's output (n, heads * head_dim)."""
        attention = self._decoder_layers[layer].self_attn
        out: torch.Tensor = attention.attn(*attention.inputs(places.positions, hidden), batch)
        return out

    def finish(self, layer: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The rest of a layer -> the next one's normalised input, or the final states.

        residual: the stream (n, hidden_size), in place.
        """
        return self._decoder_layers[layer].finish(attended, residual, self._norms[layer + 1])

    def finish_rows(
        self, attended: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """finish, of the last layer and for rows int64 (m,) only -> (m, hidden_size)."""
        return self.finish(
            self._last, attended.index_select(0, rows), residual.index_select(0, rows)
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def is_redundant_weight(self, name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq")
