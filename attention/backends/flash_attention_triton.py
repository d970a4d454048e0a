"""FlashAttention-3 for prefill and mixed steps, this repository's Triton kernel for decode steps.

A decode step reads every key once for a handful of queries, so the memory sets the pace. There the
Triton kernel comes closer to the memory's rate than FlashAttention-3, which is built for many
queries a row; docs/performance.md has both.
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
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.kernels.paged_decode import (
    DecodeGeometry,
    DecodePlan,
    DecodeScales,
    PagedDecode,
)
from attention.kernels.step_tables import StepTables
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend


class TritonDecoder:
    """Decode attention of a model's layers over a pool; each window's first layer plans for all.

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
                "Triton decode needs K and V heads of one size, "
                f"this model has {config.head_dim} and {config.v_head_dim}"
            )
        self._pool = token_to_kv_pool
        self._k_scales = k_scales.split(1)
        self._v_scales = v_scales.split(1)
        self._planning_layers = _first_layers_of_windows(config)
        self._plans: dict[int, DecodePlan] = {}
        geometry = DecodeGeometry(
            kv_heads=config.tp_k_head_num,
            group=config.tp_q_head_num // config.tp_k_head_num,
            head_dim=config.head_dim,
            page_size=token_to_kv_pool.page_size,
        )
        self._decode = PagedDecode(geometry, config.device)

    def start_step(self) -> None:
        """Forget the last step's plans."""
        self._plans = {}

    def attend(
        self, q: torch.Tensor, layer: AttentionLayer, metadata: FlashAttentionMetadata
    ) -> torch.Tensor:
        """q (bs, tp_q_head_num, head_dim) -> the same shape and dtype."""
        if metadata.batch_size == 0:
            return torch.empty_like(q)
        k_pages, v_pages = self._pool.get_kv_buffer(layer.layer_id)
        scales = DecodeScales(
            layer.scaling,
            layer.logit_cap,
            layer.sinks,
            self._k_scales[layer.layer_id],
            self._v_scales[layer.layer_id],
        )
        lengths, table = metadata.cache_seqlens_int32, metadata.page_table
        plan = self._plan(layer, lengths)
        return self._decode.attend(q, k_pages, v_pages, table, lengths, plan, scales)

    def _plan(self, layer: AttentionLayer, cache_seqlens: torch.Tensor) -> DecodePlan:
        """Made inside forward, so that a captured graph makes it anew from each replay's lengths;
        made anew by the first layer even if one is there, as a capture follows a trial run."""
        window = layer.sliding_window_size
        if layer.layer_id in self._planning_layers or window not in self._plans:
            self._plans[window] = self._decode.plan(cache_seqlens, window)
        return self._plans[window]


@register_attention_backend("fa3_triton")
class TritonDecodeFlashAttentionBackend(FlashAttentionBackend):
    """FlashAttention-3 with Triton decode over a pool of the model's dtype."""

    capability: ClassVar[BackendCapability] = replace(
        FlashAttentionBackend.capability, name="fa3_triton"
    )

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        ones = torch.ones(config.num_layers, dtype=torch.float32, device=config.device)
        self._decoder = TritonDecoder(config, token_to_kv_pool, ones, ones)

    def _start_step(
        self, tables: StepTables, batch_size: int, max_seq_len_q: int, max_seq_len_k: int
    ) -> None:
        super()._start_step(tables, batch_size, max_seq_len_q, max_seq_len_k)
        self._decoder.start_step()

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        metadata = self._step_metadata(layer)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        return self._decoder.attend(q, layer, metadata)


@register_attention_backend("fa3_triton_fp8")
class Fp8TritonDecodeFlashAttentionBackend(Fp8FlashAttentionBackend):
    """FlashAttention-3 with Triton decode over a float8_e4m3fn pool; decode keeps q in bfloat16."""

    capability: ClassVar[BackendCapability] = replace(
        Fp8FlashAttentionBackend.capability, name="fa3_triton_fp8"
    )

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._decoder = TritonDecoder(config, token_to_kv_pool, self._k_scale, self._v_scale)

    def _start_step(
        self, tables: StepTables, batch_size: int, max_seq_len_q: int, max_seq_len_k: int
    ) -> None:
        super()._start_step(tables, batch_size, max_seq_len_q, max_seq_len_k)
        self._decoder.start_step()

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        metadata = self._step_metadata(layer)
        self._save(k, v, layer, forward_batch, save_kv_cache)
        return self._decoder.attend(q, layer, metadata)


def _first_layers_of_windows(config: AttentionConfig) -> frozenset[int]:
    """Layers before which no layer of the same window comes."""
    first: dict[int, int] = {}
    for layer_id, layer in enumerate(config.layers):
        first.setdefault(layer.sliding_window_size, layer_id)
    return frozenset(first.values())
