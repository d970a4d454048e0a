"""torch_native over a float8_e4m3fn KV cache: what a step reads is scaled back before it is used.

Exact but for the cache's own rounding, and slow: for CPUs, tests and GPUs without an fp8 kernel.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.backends.torch_native import TorchNativeBackend
from attention.backends.torch_native_rows import LayerPlan
from attention.capability import AttentionBackendError, BackendCapability
from attention.config import AttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer
from attention.kernels.torch_decode import DecodeChunk
from attention.memory.fp8_kv_pool import Fp8MHATokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend


@register_attention_backend("torch_native_fp8")
class Fp8TorchNativeBackend(TorchNativeBackend):
    """Attention in plain torch on Fp8MHATokenToKVPool."""

    capability: BackendCapability = replace(
        TorchNativeBackend.capability,
        name="torch_native_fp8",
        kv_dtypes=(torch.float8_e4m3fn,),
        has_mla=False,
        has_unlike_layers=False,
        has_shared_kv=False,
        has_bounded_accounts=False,
        has_cross_attention=False,
        is_deterministic=False,
        why_not={
            **TorchNativeBackend.capability.why_not,
            Feature.MLA: "latents are kept in the model's dtype",
            Feature.UNLIKE_LAYERS: "its pool keeps heads of one kind",
            Feature.SHARED_KV: "its pool has a place for every layer",
            Feature.BOUNDED_ACCOUNTS: "accounts keep K and V in the model's dtype",
            Feature.CROSS: "an encoder's tokens are kept in the model's dtype",
        },
    )

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        if not isinstance(token_to_kv_pool, Fp8MHATokenToKVPool):
            raise AttentionBackendError(
                "torch_native_fp8 reads an Fp8MHATokenToKVPool, "
                f"not {type(token_to_kv_pool).__name__}"
            )
        self._pool = token_to_kv_pool

    def _run_decode(self, q: torch.Tensor, plan: LayerPlan, layer: AttentionLayer) -> torch.Tensor:
        out = q.new_empty((*q.shape[:2], layer.v_head_dim))
        for chunk in plan.decode_chunks:
            keys, values = self._pool.gather_heads(layer.layer_id, chunk.key_indices)
            rows = slice(chunk.start, chunk.stop)
            gathered = _over_gathered(chunk, layer)
            out[rows] = self._decode.run(q[rows].float(), keys, values, [gathered], layer)
        return out

    def _row_kv(
        self, layer: AttentionLayer, cache_indices: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        k, v = self._pool.gather_tokens(layer.layer_id, cache_indices)
        return k.to(dtype), v.to(dtype)


def _over_gathered(chunk: DecodeChunk, layer: AttentionLayer) -> DecodeChunk:
    """The chunk alone, over the keys and values that its key_indices took from the cache."""
    num_rows, kv_heads = chunk.stop - chunk.start, layer.tp_k_head_num
    keys = torch.arange(
        len(chunk.key_indices), dtype=chunk.key_indices.dtype, device=chunk.key_indices.device
    )
    group = layer.tp_q_head_num // kv_heads
    by_head = keys.view(num_rows, kv_heads, 1, chunk.max_keys).expand(-1, -1, group, -1)
    return replace(
        chunk, start=0, stop=num_rows, key_indices=keys, value_indices=by_head.reshape(-1)
    )
