"""The Triton kernels over a float8_e4m3fn KV cache with one scale a layer for K and for V.

Keys and values become the model's dtype on their way, exactly, and are multiplied as those: half
the bytes to read, no rounding but the cache's own, on every GPU, those without fp8 products too.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.backends.triton_decoder import TritonDecoder
from attention.backends.triton_paged import TritonBackend
from attention.capability import AttentionBackendError, BackendCapability
from attention.config import AttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer
from attention.kernels.extend_shape import ExtendGeometry
from attention.kernels.paged_extend import PagedKeys
from attention.memory.fp8_kv_pool import Fp8MHATokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend


@register_attention_backend("triton_fp8")
class Fp8TritonBackend(TritonBackend):
    """The extend kernel on Fp8MHATokenToKVPool, in decode steps too."""

    capability: BackendCapability = replace(
        TritonBackend.capability,
        name="triton_fp8",
        kv_dtypes=(torch.float8_e4m3fn,),
        has_mla=False,
        has_bounded_accounts=False,
        why_not={
            **TritonBackend.capability.why_not,
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
                f"triton_fp8 reads an Fp8MHATokenToKVPool, not {type(token_to_kv_pool).__name__}"
            )
        self._kv_scales = token_to_kv_pool.kv_scales

    @classmethod
    def _check(cls, config: AttentionConfig) -> None:
        if config.kv_dtype != torch.float8_e4m3fn:
            raise AttentionBackendError(
                f"triton_fp8 reads a KV cache of torch.float8_e4m3fn, not {config.kv_dtype}"
            )
        cls._check_dims(config)

    def _geometry(self) -> ExtendGeometry:
        return replace(super()._geometry(), is_e4m3=True)

    def _make_decoder(self) -> TritonDecoder | None:
        return None

    def _keys_of(self, layer: AttentionLayer) -> PagedKeys:
        k, v = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        scales = self._kv_scales[layer.layer_id]
        return PagedKeys(k.view(torch.uint8), v.view(torch.uint8), scales)
