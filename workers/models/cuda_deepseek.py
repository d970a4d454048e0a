"""The DeepSeek family on NVIDIA GPUs: the parameters of DeepseekForCausalLM, run by fused kernels.

A layer is one product for queries and latents together, one kernel from there to what attention
takes, attention, and residual additions with their norms, which sum up partial products, over
ranks too: those of the output projection, of a dense layer's MLP and of the experts alike. Needs
Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from attention import ForwardBatch, LatentAttention, LatentTokens, UpProjections
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.layers.cuda.latent_projection import LatentProjection
from workers.layers.cuda.norm import rms_norm
from workers.layers.cuda.residual_stream import stream_ways
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.matrix import PartialGemm, partial_gemms
from workers.layers.moe.products import KERNEL_DTYPES
from workers.layers.new_tensor import NewTensor
from workers.layers.norm import RMSNorm
from workers.layers.sharding import ShardContext
from workers.models.cuda_decoder import DecoderWays, FusedCausalLM, FusedLayer
from workers.models.cuda_llama import normed_joins
from workers.models.cuda_mlps import fused_mlps
from workers.models.deepseek import (
    DeepseekAttention,
    DeepseekDecoderLayer,
    DeepseekForCausalLM,
    LowRankQueryAttention,
)
from workers.models.deepseek_family import DeepseekSpec
from workers.models.segmented import AttentionInputs, TokenPlaces


def has_fused_layers(spec: DeepseekSpec, shard: ShardContext) -> bool:
    """Whether the kernels cover a member: 16-bit weights, no biases, a rotated part of 2**n
    elements."""
    rope_dim = spec.entry.rope_dim
    has_bias = spec.has_attention_bias or spec.has_mlp_bias
    is_power = rope_dim & (rope_dim - 1) == 0
    return shard.dtype in KERNEL_DTYPES and not has_bias and is_power


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
class _LatentLayer(FusedLayer):
    joined: PartialGemm
    queries: Queries
    projection: LatentProjection
    attention: LatentAttention
    up: UpProjections

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


class CudaDeepseekForCausalLM(DeepseekForCausalLM, FusedCausalLM):
    """DeepseekForCausalLM over fused kernels."""

    def __init__(self, spec: DeepseekSpec, num_positions: int, shard: ShardContext) -> None:
        super().__init__(spec, num_positions, shard)
        self._spec = spec

    def decoder_ways(self) -> DecoderWays:
        ways = stream_ways(self._shard.tp, self.model.embed_tokens)
        layers = [one for one in self._decoder_layers if isinstance(one, DeepseekDecoderLayer)]
        joins = [
            normed_joins(ways, layer.post_attention_layernorm, next_norm)
            for layer, next_norm in zip(layers, self._norms[1:], strict=True)
        ]
        return DecoderWays(partial(ways.begin, norm=self._norms[0]), joins, ways.select_rows)

    def prepare(self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool: TokenToKVPool) -> None:
        if not isinstance(token_to_kv_pool, LatentTokenToKVPool):
            raise ValueError(f"latents do not go to a {type(token_to_kv_pool).__name__}")
        self._chooser = chooser = GemmChooser.for_device(self._shard.device)
        # A rank's partial products are summed up before other ranks' are added.
        is_alone = self._shard.tp.size == 1
        self._ways = ways = self.decoder_ways()
        attentions = [
            x.self_attn for x in self._decoder_layers if isinstance(x.self_attn, DeepseekAttention)
        ]
        joined = partial_gemms(
            chooser,
            [_join_projections(attention) for attention in attentions],
            can_split=self._spec.q_lora_rank is None,
        )
        queries = self._queries(chooser, attentions)
        o = partial_gemms(chooser, [x.o_proj.weight for x in attentions], is_alone)
        mlps = fused_mlps(chooser, [x.mlp for x in self._decoder_layers], is_alone)
        self._layers = [
            _LatentLayer(
                o=o[index],
                mlp=mlps[index],
                joins=joins,
                joined=joined[index],
                queries=queries[index],
                projection=self._projection(attention, token_to_kv_pool),
                attention=attention.attn,
                up=attention.up_projections(),
            )
            for index, (attention, joins) in enumerate(zip(attentions, ways.joins, strict=True))
        ]
        (self._head,) = partial_gemms(chooser, [self._head_weight()], False)

    def _projection(
        self, attention: DeepseekAttention, pool: LatentTokenToKVPool
    ) -> LatentProjection:
        spec = self._spec
        return LatentProjection(
            num_heads=self.geometry.tp_q_head_num,
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
            width = self.geometry.tp_q_head_num * self._spec.qk_head_dim
            return [_DirectQueries(width)] * len(attentions)
        ups = partial_gemms(chooser, [x.q_b_proj.weight for x in low_rank], True)
        return [
            _LowRankQueries(x.q_a_proj.weight.shape[0], x.q_a_layernorm, up)
            for x, up in zip(low_rank, ups, strict=True)
        ]


def _join_projections(attention: DeepseekAttention) -> torch.Tensor:
    """Queries' projection, or their compression, over that of latents, as one matrix, which both
    parameters become parts of."""
    parameters = attention.first_query_weight, attention.kv_a_proj_with_mqa.weight
    joined = torch.cat([parameter.data for parameter in parameters])
    num_query_rows = parameters[0].shape[0]
    parameters[0].data, parameters[1].data = joined[:num_query_rows], joined[num_query_rows:]
    return joined
