"""FlashAttention-3 for prefill and mixed steps, this repository's Triton kernel for decode.

A decode step reads every key once for a handful of queries, so it is the memory that sets the pace.
There the Triton kernel comes closer to the memory's rate than FlashAttention-3, which is built for
many queries; docs/performance.md has both.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.flash_attention_fp8 import Fp8FlashAttentionBackend
from attention.backends.flash_attention_metadata import FlashAttentionMetadata
from attention.capability import AttentionBackendError, BackendCapability
from attention.config import AttentionConfig
from attention.forward_batch import AttentionLayer
from attention.kernels.providers import load_paged_decode
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend


class PagedDecoder:
    """Decode attention of a model's layers over a pool, planned by each window's first layer.

    k_scales, v_scales: float32 (num_layers,) on the device, what stored values are multiplied by.
    """

    def __init__(
        self,
        config: AttentionConfig,
        token_to_kv_pool: TokenToKVPool,
        k_scales: torch.Tensor,
        v_scales: torch.Tensor,
    ) -> None:
        if config.v_head_dim != config.head_dim:
            raise AttentionBackendError(
                "paged decode needs K and V heads of one size, "
                f"this model has {config.head_dim} and {config.v_head_dim}"
            )
        kernels = load_paged_decode()
        self._scales_type = kernels.DecodeScales
        self._pool = token_to_kv_pool
        self._k_scales = list(k_scales.split(1))
        self._v_scales = list(v_scales.split(1))
        self._decode = kernels.PagedDecode(
            kernels.DecodeGeometry(
                kv_heads=config.tp_k_head_num,
                group=config.tp_q_head_num // config.tp_k_head_num,
                head_dim=config.head_dim,
                page_size=token_to_kv_pool.page_size,
            ),
            config.device,
        )
