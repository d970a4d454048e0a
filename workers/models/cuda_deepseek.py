"""The DeepSeek family on NVIDIA GPUs: the parameters of DeepseekForCausalLM, run by fused kernels.

A layer is one product for queries and latents together, one kernel from there to what attention
takes, attention, and residual additions with their norms, which sum up partial products, over
ranks too: those of the output projection, of a dense layer's MLP and of the experts alike. Needs
Triton.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from attention import ForwardBatch, LatentAttention, LatentTokens, UpProjections
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.layers.cuda.latent_projection import LatentProjection
from workers.layers.cuda.norm import rms_norm
from workers.layers.cuda.residual_stream import StreamWays, stream_ways
from workers.layers.embedding import TiedLMHead
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.matrix import PartialGemm, partial_gemms
from workers.layers.moe.products import KERNEL_DTYPES
from workers.layers.new_tensor import NewTensor
from workers.layers.norm import RMSNorm
from workers.layers.sharding import ShardContext
from workers.models.cuda_llama import normed_joins
from workers.models.cuda_mlps import FusedMlp, fused_mlps
from workers.models.cuda_stream import LayerJoins
from workers.models.deepseek import (
    DeepseekAttention,
    DeepseekForCausalLM,
    LowRankQueryAttention,
)
from workers.models.deepseek_family import DeepseekSpec
from workers.models.segmented import AttentionInputs, SegmentedCausalLM, TokenPlaces
from workers.models.token_inputs import ModelOutput, TokenInputs


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
class _FusedLayer:
    joined: PartialGemm
    queries: Queries
    projection: LatentProjection
    attention: LatentAttention
    up: UpProjections
    o: PartialGemm
    mlp: FusedMlp
    joins: LayerJoins

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
        hidden = self.joins.after_attention(self.o, attended, residual)
        return self.joins.after_mlp(self.mlp.last, self.mlp.inner(hidden), residual)


class CudaDeepseekForCausalLM(DeepseekForCausalLM, SegmentedCausalLM):
    """DeepseekForCausalLM over fused kernels. prepare must run before the first step."""

    def __init__(self, spec: DeepseekSpec, num_positions: int, shard: ShardContext) -> None:
        super().__init__(spec, num_positions, shard)
        self._spec = spec
        self._shard = shard
        self._layers: list[_FusedLayer] = []
        self._head: PartialGemm | None = None
        self._ways: StreamWays | None = None
        self._chooser: GemmChooser | None = None
        self.vocab_shard = None if shard.tp.size == 1 else self.model.embed_tokens.rows

    def prepare(self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool: TokenToKVPool) -> None:
        if not isinstance(token_to_kv_pool, LatentTokenToKVPool):
            raise ValueError(f"latents do not go to a {type(token_to_kv_pool).__name__}")
        self._chooser = chooser = GemmChooser.for_device(self._shard.device)
        # A rank's partial products are summed up before other ranks' are added.
        is_alone = self._shard.tp.size == 1
        self._ways = ways = stream_ways(self._shard.tp, self.model.embed_tokens)
        layers = self.model.decoder_layers
        attentions = [layer.self_attn for layer in layers]
        joined = partial_gemms(
            chooser,
            [_join_projections(attention) for attention in attentions],
            can_split=self._spec.q_lora_rank is None,
        )
        queries = self._queries(chooser, attentions)
        o = partial_gemms(chooser, [x.o_proj.weight for x in attentions], is_alone)
        mlps = fused_mlps(chooser, [layer.mlp for layer in layers], is_alone)
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
                joins=normed_joins(ways, norms[index], nexts[index]),
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
        norm = self.model.decoder_layers[0].input_layernorm
        return self._prepared_ways().begin(input_ids, norm)

    def unlike_layers(self) -> frozenset[int]:
        kinds = [type(layer.mlp) for layer in self._layers]
        return frozenset(map(kinds.index, kinds))

    def _prepared_ways(self) -> StreamWays:
        if self._ways is None:
            raise RuntimeError("prepare must run before the first step")
        return self._ways

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
        selected = self._prepared_ways().select_rows(residual, rows)
        return self._layers[-1].finish(attended.index_select(0, rows), selected)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """In the model's dtype: whoever needs float32 converts the rows that need it."""
        return self.whole_logits(self.local_logits(hidden))

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._head is None:
            raise RuntimeError("prepare must run before the first step")
        return self._head(hidden)[0]

    def whole_logits(self, local: torch.Tensor) -> torch.Tensor:
        return self._shard.tp.all_gather_last_dim(local)[:, : self.vocab_size]


def _join_projections(attention: DeepseekAttention) -> torch.Tensor:
    """Queries' projection, or their compression, over that of latents, as one matrix, which both
    parameters become parts of."""
    parameters = attention.first_query_weight, attention.kv_a_proj_with_mqa.weight
    joined = torch.cat([parameter.data for parameter in parameters])
    num_query_rows = parameters[0].shape[0]
    parameters[0].data, parameters[1].data = joined[:num_query_rows], joined[num_query_rows:]
    return joined
