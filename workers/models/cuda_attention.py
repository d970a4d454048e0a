"""Attention of a fused layer: what turns QKV partial products into what attention takes.

Knows the backend's contract, no kernel of attention and no layer around it.
"""

from dataclasses import dataclass
from typing import Protocol

import torch

from attention import ForwardBatch, RadixAttention
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.qkv_projection import QKVProjection, Rotation
from workers.layers.cuda.rope import FusedRope, RopeShape
from workers.layers.new_tensor import NewTensor
from workers.models.grouped_attention import GroupedQueryAttention
from workers.models.segmented import AttentionInputs, TokenPlaces


class LayerAttention(Protocol):
    """One layer's: rotate, then attend; or, if takes_projected, attend_projected."""

    def rotate(self, qkv: torch.Tensor, places: TokenPlaces, new: NewTensor) -> AttentionInputs:
        """Partial products (splits, n, qkv width) -> what attend takes, in tensors of new."""

    def attend(self, inputs: AttentionInputs, batch: ForwardBatch) -> torch.Tensor:
        """(n, heads * head_dim) of the batch's n tokens."""

    def attend_projected(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """A decode step whose backend rotates as well: (n, heads * head_dim)."""

    def takes_projected(self, batch: ForwardBatch) -> bool:
        """Whether the step should go through attend_projected: the backend can, and it pays."""


@dataclass(frozen=True, slots=True)
class PooledAttention:
    """The rope kernel itself writes K and V to the layer's pages, or, in decode steps where the
    backend can, the attention kernel does all of it.

    k_rows, v_rows: the pages as (tokens, kv_heads * head_dim). account: of these pages.
    """

    attention: RadixAttention
    rope: FusedRope
    dtype: torch.dtype
    k_rows: torch.Tensor
    v_rows: torch.Tensor
    account: int

    def rotate(self, qkv: torch.Tensor, places: TokenPlaces, new: NewTensor) -> AttentionInputs:
        targets = places.cache_locs[self.account], self.k_rows, self.v_rows
        return (self.rope(qkv, places.positions, *targets, self.dtype, new),)

    def attend(self, inputs: AttentionInputs, batch: ForwardBatch) -> torch.Tensor:
        (q,) = inputs
        # K and V are in the pool already: attention reads them there and ignores these.
        k, v = self.k_rows[: batch.num_tokens], self.v_rows[: batch.num_tokens]
        attended: torch.Tensor = self.attention(q, k, v, batch, save_kv_cache=False)
        return attended

    def attend_projected(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        projection = QKVProjection(qkv, self.rope.rotation, self.dtype)
        attended: torch.Tensor = self.attention.forward_projected(projection, batch)
        return attended

    def takes_projected(self, batch: ForwardBatch) -> bool:
        fuses = batch.attn_backend.fuses_decode_projection
        return batch.forward_mode.is_decode and fuses(batch.batch_size)


@dataclass(frozen=True, slots=True)
class SavedAttention:
    """The backend writes K and V: the pool holds them in another form than the model's dtype."""

    attention: RadixAttention
    rope: FusedRope
    dtype: torch.dtype

    def rotate(self, qkv: torch.Tensor, places: TokenPlaces, new: NewTensor) -> AttentionInputs:
        return self.rope.into_new(qkv, places.positions, self.dtype, new)

    def attend(self, inputs: AttentionInputs, batch: ForwardBatch) -> torch.Tensor:
        attended: torch.Tensor = self.attention(*inputs, batch)
        return attended

    def attend_projected(self, qkv: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Never asked for: see takes_projected."""
        raise NotImplementedError("the pool's form of K and V is the backend's to write")

    def takes_projected(self, batch: ForwardBatch) -> bool:
        return False


def layer_attention(
    module: GroupedQueryAttention, token_to_kv_pool: TokenToKVPool, dtype: torch.dtype
) -> LayerAttention:
    """For one layer over a pool."""
    qkv = module.qkv_proj
    shape = RopeShape(qkv.tp_q_head_num, qkv.tp_k_head_num, module.head_dim)
    rope = FusedRope(shape, Rotation(module.rotary.cos_sin, qkv.bias, module.head_norm))
    layer_id = module.attn.layer_id
    k_pool, v_pool = token_to_kv_pool.get_kv_buffer(layer_id)
    if k_pool.dtype != dtype:
        return SavedAttention(module.attn, rope, dtype)
    width = qkv.tp_k_head_num * module.head_dim
    rows = k_pool.view(-1, width), v_pool.view(-1, width)
    return PooledAttention(module.attn, rope, dtype, *rows, token_to_kv_pool.account_of(layer_id))
