"""The DeepSeek family on one NVIDIA GPU: the parameters of DeepseekForCausalLM, fused kernels.

A layer is one product for queries and latents together, one kernel from there to what attention
takes, attention, and residual additions with their norms, which sum up partial products: those of
the output projection, of a dense layer's MLP and of the experts alike. Needs Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from attention import ForwardBatch, LatentAttention, LatentTokens, UpProjections
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.layers.cuda.experts import GroupedMixture
from workers.layers.cuda.latent_projection import LatentProjection
from workers.layers.cuda.norm import add_rms_norm_, rms_norm
from workers.layers.embedding import TiedLMHead
from workers.layers.gated_mlp import GatedMLP
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.matrix import GatedGemm, PartialGemm, gated_gemms, partial_gemms
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.moe.products import KERNEL_DTYPES
from workers.layers.new_tensor import NewTensor
from workers.layers.norm import RMSNorm
from workers.layers.sharding import ShardContext
from workers.models.deepseek import (
    DeepseekAttention,
    DeepseekForCausalLM,
    LowRankQueryAttention,
)
from workers.models.deepseek_family import DeepseekSpec
from workers.models.segmented import AttentionInputs, SegmentedCausalLM, TokenPlaces
from workers.models.token_inputs import ModelOutput, TokenInputs


def has_fused_layers(spec: DeepseekSpec, shard: ShardContext) -> bool:
    """Whether the kernels cover a member: one rank, 16-bit weights, no biases, a rotated part of
    2**n elements."""
    rope_dim = spec.entry.rope_dim
    has_bias = spec.has_attention_bias or spec.has_mlp_bias
    is_power = rope_dim & (rope_dim - 1) == 0
    return shard.tp.size == 1 and shard.dtype in KERNEL_DTYPES and not has_bias and is_power


class Partials(Protocol):
    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """(n, hidden_size) -> (parts, n, hidden_size), whose sum is what a block adds."""


class Queries(Protocol):
    def __call__(self, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What the joined projection gives (splits, n, width) -> partial products of queries and
        of latents with rotated key parts, each (splits, n, its width)."""


@dataclass(frozen=True, slots=True)
class _DirectQueries:
    width: int

    def __call__(self, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        queries, keys = joined.tensor_split((self.width,), dim=-1)
        return queries, keys


@dataclass(frozen=True, slots=True)
class _LowRankQueries:
    """The joined projection is not split: what it gives of queries is normalised and projected."""

    width: int
    norm: RMSNorm
    up: PartialGemm

    def __call__(self, joined: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        compressed, keys = joined.tensor_split((self.width,), dim=-1)
        normed = rms_norm(compressed[0].contiguous(), self.norm.weight, self.norm.eps)
        return self.up(normed), keys


@dataclass(frozen=True, slots=True)
class _DenseMlp:
    gate_up: GatedGemm
    down: PartialGemm

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(self.gate_up(hidden))


@dataclass(frozen=True, slots=True)
class _FusedLayer:
    joined: PartialGemm
    queries: Queries
    projection: LatentProjection
    attention: LatentAttention
    up: UpProjections
    o: PartialGemm
    mlp: Partials
    mlp_norm: RMSNorm
    next_norm: RMSNorm

    def attention_inputs(
        self, hidden: torch.Tensor, places: TokenPlaces, new: NewTensor
    ) -> AttentionInputs:
        """hidden: normalised input -> queries and what the pool keeps, which has it by then."""
        queries, keys = self.queries(self.joined(hidden))
        return self.projection(queries, keys, places.positions, places.cache_locs[0], new)

    def attend(self, inputs: AttentionInputs, batch: ForwardBatch) -> torch.Tensor:
        q, kept = inputs
        q_nope, q_rope = q.tensor_split((self.projection.nope_dim,), dim=-1)
        latent, k_rope = kept.tensor_split((self.attention.entry.latent_dim,), dim=-1)
        tokens = LatentTokens(q_nope, q_rope, latent, k_rope, is_saved=True)
        attended: torch.Tensor = self.attention(tokens, self.up, batch)
        return attended

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual: the stream, in place -> the next layer's normalised input."""
        norm = self.mlp_norm
        hidden = add_rms_norm_(self.o(attended), residual, norm.weight, norm.eps)
        norm = self.next_norm
        return add_rms_norm_(self.mlp(hidden), residual, norm.weight, norm.eps)


class CudaDeepseekForCausalLM(DeepseekForCausalLM, SegmentedCausalLM):
    """DeepseekForCausalLM over fused kernels. prepare must run before the first step."""

    def __init__(self, spec: DeepseekSpec, num_positions: int, shard: ShardContext) -> None:
        super().__init__(spec, num_positions, shard)
        self._spec = spec
        self._shard = shard
        self._layers: list[_FusedLayer] = []
        self._head: PartialGemm | None = None
        self._chooser: GemmChooser | None = None

    def prepare(self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool: TokenToKVPool) -> None:
        if not isinstance(token_to_kv_pool, LatentTokenToKVPool):
            raise ValueError(f"latents do not go to a {type(token_to_kv_pool).__name__}")
        self._chooser = chooser = GemmChooser.for_device(self._shard.device)
        layers = self.model.decoder_layers
        attentions = [layer.self_attn for layer in layers]
        joined = partial_gemms(
            chooser,
            [_join_projections(attention) for attention in attentions],
            can_split=self._spec.q_lora_rank is None,
        )
        queries = self._queries(chooser, attentions)
        o = partial_gemms(chooser, [x.o_proj.weight for x in attentions], True)
        mlps = self._mlps(chooser, [layer.mlp for layer in layers])
        norms = [layer.post_attention_layernorm for layer in layers]
        nexts = [*(layer.input_layernorm for layer in layers[1:]), self.model.norm]
        self._layers = [
            _FusedLayer(
                joined=joined[index],
                queries=queries[index],
                projection=self._projection(attention, token_to_kv_pool),
                attention=attention.attn,
                up=attention.up_projections(),
                o=o[index],
                mlp=mlps[index],
                mlp_norm=norms[index],
                next_norm=nexts[index],
            )
            for index, attention in enumerate(attentions)
        ]
        embedding = self.model.embed_tokens
        owner = embedding if isinstance(self.lm_head, TiedLMHead) else self.lm_head
        (self._head,) = partial_gemms(chooser, [owner.get_parameter("weight")], False)

    def _projection(
        self, attention: DeepseekAttention, pool: LatentTokenToKVPool
    ) -> LatentProjection:
        spec = self._spec
        return LatentProjection(
            num_heads=spec.num_heads,
            nope_dim=spec.nope_dim,
            norm_weight=attention.kv_a_layernorm.weight,
            eps=attention.kv_a_layernorm.eps,
            cos_sin=attention.rotary.cos_sin,
            is_interleaved=spec.is_interleaved,
            pool=pool.get_latent(attention.attn.layer_id).flatten(0, 1),
        )

    def _queries(
        self, chooser: GemmChooser, attentions: Sequence[DeepseekAttention]
    ) -> list[Queries]:
        low_rank = [x for x in attentions if isinstance(x, LowRankQueryAttention)]
        if not low_rank:
            width = self._spec.num_heads * self._spec.qk_head_dim
            return [_DirectQueries(width)] * len(attentions)
        ups = partial_gemms(chooser, [x.q_b_proj.weight for x in low_rank], True)
        return [
            _LowRankQueries(x.q_a_proj.weight.shape[0], x.q_a_layernorm, up)
            for x, up in zip(low_rank, ups, strict=True)
        ]

    def _mlps(
        self, chooser: GemmChooser, mlps: Sequence[GatedMLP | MixtureOfExperts]
    ) -> list[Partials]:
        dense = [mlp for mlp in mlps if isinstance(mlp, GatedMLP)]
        fused: dict[nn.Module, Partials] = {
            mlp: GroupedMixture(mlp, is_summed=False)
            for mlp in mlps
            if isinstance(mlp, MixtureOfExperts)
        }
        if dense:
            gate_up = gated_gemms(chooser, [mlp.gate_up_proj.weight for mlp in dense], "silu")
            down = partial_gemms(chooser, [mlp.down_proj.weight for mlp in dense], True)
            fused |= zip(dense, map(_DenseMlp, gate_up, down), strict=True)
        return [fused[mlp] for mlp in mlps]

    def prepare_while_idle(self) -> bool:
        """GEMMs that there was no time to measure, one timing at a time."""
        return self._chooser is not None and self._chooser.measure_next()

    def forward(self, tokens: TokenInputs, forward_batch: ForwardBatch) -> ModelOutput:
        attended, residual = self._up_to_last(tokens, forward_batch)
        return ModelOutput(self._layers[-1].finish(attended, residual))

    def forward_rows(
        self, tokens: TokenInputs, forward_batch: ForwardBatch, rows: torch.Tensor
    ) -> ModelOutput:
        """The last layer's latents are for everybody, the rest of it is for rows only."""
        attended, residual = self._up_to_last(tokens, forward_batch)
        return ModelOutput(self.finish_rows(attended, residual, rows))

    def _up_to_last(
        self, tokens: TokenInputs, batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last layer's attention output and the stream that it joins."""
        places = TokenPlaces(tokens.positions, batch.locs_by_account)
        residual, hidden = self.begin(tokens.ids)
        for index, layer in enumerate(self._layers):
            attended = layer.attend(layer.attention_inputs(hidden, places, torch.empty), batch)
            if index < len(self._layers) - 1:
                hidden = layer.finish(attended, residual)
        return attended, residual

    def begin(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if not self._layers:
            raise RuntimeError("prepare must run before the first step")
        residual: torch.Tensor = self.model.embed_tokens(input_ids)
        norm = self.model.decoder_layers[0].input_layernorm
        return residual, rms_norm(residual, norm.weight, norm.eps)

    def attention_inputs(
        self, layer: int, hidden: torch.Tensor, places: TokenPlaces, new: NewTensor
    ) -> AttentionInputs:
        return self._layers[layer].attention_inputs(hidden, places, new)

    def attend(self, layer: int, inputs: AttentionInputs, batch: ForwardBatch) -> torch.Tensor:
        return self._layers[layer].attend(inputs, batch)

    def finish(self, layer: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._layers[layer].finish(attended, residual)

    def finish_rows(
        self, attended: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        if rows.shape[0] == 0:
            return residual[:0]
        chosen = residual.index_select(0, rows)
        return self._layers[-1].finish(attended.index_select(0, rows), chosen)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """In the model's dtype: whoever needs float32 converts the rows that need it."""
        if self._head is None:
            raise RuntimeError("prepare must run before the first step")
        return self._head(hidden)[0][:, : self.vocab_size]


def _join_projections(attention: DeepseekAttention) -> torch.Tensor:
    """Queries' projection, or their compression, over that of latents, as one matrix, which both
    parameters become parts of."""
    parameters = attention.first_query_weight, attention.kv_a_proj_with_mqa.weight
    joined = torch.cat([parameter.data for parameter in parameters])
    num_query_rows = parameters[0].shape[0]
    parameters[0].data, parameters[1].data = joined[:num_query_rows], joined[num_query_rows:]
    return joined
