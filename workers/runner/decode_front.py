"""The fused layers' way into decode attention, for who measures it. Imported on CUDA only."""

import torch

from attention import ForwardBatch, RadixAttention
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.qkv_projection import QKVProjection
from workers.layers.cuda.rope import FusedRope, RopeShape
from workers.models.cuda_attention import PooledAttention
from workers.models.segmented import TokenPlaces


class FusedFront:
    """DecodeFront as models over fused kernels have it: one kernel rotates and writes K and V."""

    def attend(
        self, projection: QKVProjection, layer: RadixAttention, batch: ForwardBatch
    ) -> torch.Tensor:
        pool: TokenToKVPool = batch.attn_backend.token_to_kv_pool  # type: ignore[attr-defined]
        width = layer.tp_k_head_num * layer.head_dim
        k_rows, v_rows = (pages.view(-1, width) for pages in pool.get_kv_buffer(layer.layer_id))
        shape = RopeShape(layer.tp_q_head_num, layer.tp_k_head_num, layer.head_dim)
        rope = FusedRope(shape, projection.rotation)
        account = pool.account_of(layer.layer_id)
        pooled = PooledAttention(layer, rope, projection.dtype, k_rows, v_rows, account)
        places = TokenPlaces(batch.positions, batch.locs_by_account)
        inputs = pooled.rotate(projection.partials, places, torch.empty)
        return pooled.attend(inputs, batch)
