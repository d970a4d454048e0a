"""FlashAttention-3 over a float8_e4m3fn KV cache with one scale a layer for K and for V.

The kernel computes both products in e4m3 and returns bfloat16; queries are rounded to e4m3 first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from attention.backends.flash_attention import MAX_HEAD_DIM, FlashAttentionBackend
from attention.backends.flash_attention_metadata import FlashAttentionMetadata
from attention.capability import AttentionBackendError, BackendCapability
from attention.config import AttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer
from attention.memory.fp8_kv_pool import Fp8MHATokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend

_HEAD_DIM_MULTIPLE = 16  # 16 bytes of e4m3


@register_attention_backend("fa3_fp8")
class Fp8FlashAttentionBackend(FlashAttentionBackend):
    """FlashAttention-3 on Fp8MHATokenToKVPool. Half the bytes to read, errors near 3 %."""

    capability: BackendCapability = replace(
        FlashAttentionBackend.capability,
        name="fa3_fp8",
        dtypes=(torch.bfloat16,),
        kv_dtypes=(torch.float8_e4m3fn,),
        has_mla=False,
        has_bounded_accounts=False,
        head_dims=range(_HEAD_DIM_MULTIPLE, MAX_HEAD_DIM + 1, _HEAD_DIM_MULTIPLE),
        # Beside K heads of 64, V heads of 256 come out wrong, without an error.
        unequal_head_dims=((range(144, 193, 16), range(112, 129, 16)),),
        why_not={
            **FlashAttentionBackend.capability.why_not,
            Feature.MLA: "latents are kept in the model's dtype",
            Feature.BOUNDED_ACCOUNTS: "accounts keep K and V in the model's dtype",
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
                f"fa3_fp8 reads an Fp8MHATokenToKVPool, not {type(token_to_kv_pool).__name__}"
            )
        self._kv_scales = token_to_kv_pool.kv_scales

    @classmethod
    def _check_kv_dtype(cls, config: AttentionConfig) -> None:
        if config.kv_dtype != torch.float8_e4m3fn or config.dtype != torch.bfloat16:
            raise AttentionBackendError(
                "fa3_fp8 computes in torch.bfloat16 over a torch.float8_e4m3fn KV cache, "
                f"not in {config.dtype} over {config.kv_dtype}"
            )
        if config.head_dim % _HEAD_DIM_MULTIPLE or config.v_head_dim % _HEAD_DIM_MULTIPLE:
            raise AttentionBackendError(
                f"fa3_fp8 needs head dims that are multiples of {_HEAD_DIM_MULTIPLE}, "
                f"this model has {(config.head_dim, config.v_head_dim)}"
            )

    def _attend(
        self,
        q: torch.Tensor,
        layer: AttentionLayer,
        metadata: FlashAttentionMetadata,
        schedule: torch.Tensor | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if q.shape[0] == 0:
            return super()._attend(q, layer, metadata, schedule, out)
        return super()._attend(self._triton.quantise_queries(q), layer, metadata, schedule, out)

    def _pool_arguments(
        self, layer: AttentionLayer, metadata: FlashAttentionMetadata
    ) -> dict[str, Any]:
        """The layer's scales for every row and KV head, as views without a stride."""
        k_scale, v_scale = self._kv_scales[layer.layer_id].unbind()
        rows_and_heads = (metadata.batch_size, layer.tp_k_head_num)
        return {
            "k_descale": k_scale.expand(rows_and_heads),
            "v_descale": v_scale.expand(rows_and_heads),
        }
