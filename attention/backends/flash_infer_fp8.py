"""FlashInfer over a float8_e4m3fn KV cache with one scale a layer for K and for V.

Queries stay in the model's dtype: keys and values become it on their way. The scales are numbers on
the host, the one of V a launch behind each layer's attention. Knows no request.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.backends.flash_infer import FlashInferBackend
from attention.capability import AttentionBackendError, BackendCapability
from attention.config import AttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer
from attention.memory.fp8_kv_pool import Fp8MHATokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend


@register_attention_backend("flashinfer_fp8")
class Fp8FlashInferBackend(FlashInferBackend):
    """On Fp8MHATokenToKVPool, whose scales are set before the first step."""

    capability: BackendCapability = replace(
        FlashInferBackend.capability,
        name="flashinfer_fp8",
        kv_dtypes=(torch.float8_e4m3fn,),
        has_mla=False,
        has_bounded_accounts=False,
        why_not={
            **FlashInferBackend.capability.why_not,
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
        if not isinstance(token_to_kv_pool, Fp8MHATokenToKVPool):
            name = type(token_to_kv_pool).__name__
            raise AttentionBackendError(f"flashinfer_fp8 reads an Fp8MHATokenToKVPool, not {name}")
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._scales = token_to_kv_pool.host_scales

    @classmethod
    def _check(cls, config: AttentionConfig) -> None:
        if config.kv_dtype != torch.float8_e4m3fn:
            raise AttentionBackendError(
                f"flashinfer_fp8 reads a KV cache of torch.float8_e4m3fn, not {config.kv_dtype}"
            )
        cls._check_dims(config)

    def _pool_arguments(self, layer: AttentionLayer) -> dict[str, float]:
        k_scale, v_scale = self._scales[layer.layer_id]
        return {"k_scale": k_scale, "v_scale": v_scale}
