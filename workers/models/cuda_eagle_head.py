"""The head of EAGLE-3 on NVIDIA GPUs: the parameters of EagleHead, run by fused kernels.

Products are those of the modules; what stands between two of them is one launch. Nothing waits for
the device, and nothing is kept from one pass to the next. Needs Triton.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from attention import ForwardBatch, LayerAttentionConfig
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.qkv_projection import QKVProjection, Rotation
from workers.layers.cuda.activation import gate_and_mul
from workers.layers.cuda.likeliest import likeliest_named
from workers.layers.cuda.norm import add_rms_norm_, rms_norm
from workers.layers.cuda.pair_norm import pair_norm
from workers.layers.cuda.rope import FusedRope, RopeShape
from workers.layers.embedding import likeliest_tokens
from workers.layers.rotary import RotaryEmbedding
from workers.layers.sharding import ShardContext
from workers.models.eagle_head import EagleHead, EagleLayer, EagleSpec, PairAttention
from workers.models.grouped_attention import AttentionSpec
from workers.models.pair_states import StatesBefore


class KeyWriter(Protocol):
    def __call__(
        self,
        rope: FusedRope,
        projected: torch.Tensor,
        positions: torch.Tensor,
        cache_indices: torch.Tensor,
    ) -> None:
        """projected (parts, n, 2 * kv_heads * head_dim), whose sum over parts is K and V before
        rotation -> the layer's pages, at cache_indices. rope: of a shape without queries. The
        others: int64 (n,)."""


@dataclass(frozen=True, slots=True)
class _IntoPages:
    """The rope kernel itself writes. k_pages, v_pages: contiguous, of the model's dtype."""

    k_pages: torch.Tensor
    v_pages: torch.Tensor

    def __call__(
        self,
        rope: FusedRope,
        projected: torch.Tensor,
        positions: torch.Tensor,
        cache_indices: torch.Tensor,
    ) -> None:
        rope(projected, positions, cache_indices, self.k_pages, self.v_pages, self.k_pages.dtype)


@dataclass(frozen=True, slots=True)
class _ByPool:
    """The pool writes: it holds K and V in another form than dtype, the model's."""

    pool: TokenToKVPool
    layer_id: int
    dtype: torch.dtype

    def __call__(
        self,
        rope: FusedRope,
        projected: torch.Tensor,
        positions: torch.Tensor,
        cache_indices: torch.Tensor,
    ) -> None:
        _, k, v = rope.into_new(projected, positions, self.dtype)
        self.pool.set_kv_buffer(self.layer_id, cache_indices, k, v)


def key_writer(pool: TokenToKVPool, layer_id: int, dtype: torch.dtype) -> KeyWriter:
    """For one layer of a model of dtype."""
    pages = pool.get_kv_buffer(layer_id)
    return _IntoPages(*pages) if pages[0].dtype == dtype else _ByPool(pool, layer_id, dtype)


class CudaPairAttention(PairAttention):
    def __init__(
        self,
        spec: AttentionSpec,
        layer: LayerAttentionConfig,
        layer_id: int,
        rotary: RotaryEmbedding,
        shard: ShardContext,
    ) -> None:
        super().__init__(spec, layer, layer_id, rotary, shard)
        num_kv_heads = self.qkv_proj.tp_k_head_num
        # The projection is the module's, with its bias.
        rotation = Rotation(rotary.cos_sin, None, None)
        whole = RopeShape(self.qkv_proj.tp_q_head_num, num_kv_heads, self.head_dim)
        self._rope = FusedRope(whole, rotation)
        self._key_rope = FusedRope(RopeShape(0, num_kv_heads, self.head_dim), rotation)

    def inputs(
        self, positions: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        projected = self.qkv_proj.parts(hidden)
        return self._rope.into_new(projected, positions, hidden.dtype)

    def attended(
        self, hidden: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Where the backend can, the attention kernel does all behind the projection. The lookup of
        what the pass reads is the ordinary launch that it asks for between the step's tables and
        this layer."""
        fuses = forward_batch.attn_backend.fuses_decode_projection
        if not (forward_batch.forward_mode.is_decode and fuses(forward_batch.batch_size)):
            return super().attended(hidden, positions, forward_batch)
        projected = self.qkv_proj.parts(hidden)
        projection = QKVProjection(projected, self._rope.rotation, hidden.dtype)
        attended: torch.Tensor = self.attn.forward_projected(projection, forward_batch)
        return attended

    def keep(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache_indices: torch.Tensor,
        pool: TokenToKVPool,
    ) -> None:
        """Of the projection, the rows of K and V only."""
        projected = self.qkv_proj.keys_and_values(hidden)
        write = key_writer(pool, self.attn.layer_id, hidden.dtype)
        write(self._key_rope, projected, positions, cache_indices)


class CudaEagleLayer(EagleLayer):
    attention_class = CudaPairAttention

    def inputs_at(
        self,
        embedded: torch.Tensor,
        rows: torch.Tensor | None,
        before: StatesBefore,
        may_depend: bool = True,
    ) -> torch.Tensor:
        """As inputs, of rows of embedded, (m, hidden_size), or of all; gathers nothing first."""
        weights, eps = (self.input_layernorm.weight, self.hidden_norm.weight), self.hidden_norm.eps
        return pair_norm(embedded, before.states, weights, eps, rows, before.rows, may_depend)

    def forward(
        self,
        inputs: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """As EagleLayer.forward; all contiguous."""
        stream, gated = self.attended(inputs, states, positions, forward_batch)
        return stream.add_(self.mlp.down_proj(gated))

    def attended(
        self,
        inputs: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream behind attention, to which forward adds down_proj of the other tensor."""
        attended = self.self_attn.attended(inputs, positions, forward_batch)
        # The projection's own tensor becomes the stream: others go on from the states.
        stream: torch.Tensor = self.self_attn.o_proj(attended)
        norm = self.post_attention_layernorm
        normed = add_rms_norm_(states.unsqueeze(0), stream, norm.weight, norm.eps)
        gate_up = self.mlp.gate_up_proj.parts(normed)
        gated = gate_and_mul(gate_up, normed.dtype, self.mlp.gate)
        return stream, gated


class CudaEagleHead(EagleHead):
    layer_class = CudaEagleLayer
    midlayer: CudaEagleLayer

    def __init__(self, spec: EagleSpec, num_positions: int, shard: ShardContext) -> None:
        super().__init__(spec, num_positions, shard)
        self._is_alone = shard.tp.size == 1

    def pair_inputs(self, ids: torch.Tensor, before: StatesBefore) -> torch.Tensor:
        """Of a rank that has the whole embedding in one launch."""
        if self._is_alone:
            return self.midlayer.inputs_at(self.embed_tokens.weight, ids, before)
        return self.midlayer.inputs_at(self.embed_tokens(ids), None, before)

    def pass_inputs(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """In an ordinary launch, whatever the products are: see CudaPairAttention.attended."""
        if not self._is_alone:
            return super().pass_inputs(ids, states)
        weight, before = self.embed_tokens.weight, StatesBefore(states)
        return self.midlayer.inputs_at(weight, ids, before, may_depend=False)

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        return rms_norm(states, self.norm.weight, self.norm.eps)

    def draft(
        self, ids: torch.Tensor, states: torch.Tensor, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As PairHead.draft; a rank that has all logits needs nothing but them."""
        inputs = self.pass_inputs(ids, states)
        positions = forward_batch.positions
        made, gated = self.midlayer.attended(inputs, states, positions, forward_batch)
        parts = self.midlayer.mlp.down_proj.parts(gated)
        normed = add_rms_norm_(parts, made, self.norm.weight, self.norm.eps)
        logits = self.lm_head.local(normed)
        if self._is_alone:
            return likeliest_named(logits, self.target_ids), made
        columns = likeliest_tokens(logits, self.lm_head.rows, self.lm_head.tp)
        return self.named(columns), made
