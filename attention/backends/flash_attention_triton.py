"""FlashAttention-3 for prefill and mixed steps, this repository's Triton kernel for decode steps.

The Triton kernel was measured faster where a step has many rows of few keys (a fifth at 256 rows of
256) and slower where rows are few or long: docs/performance.md has both. It is taken by name only,
never by automatic choice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.flash_attention_metadata import FlashAttentionMetadata, StepFacts
from attention.capability import AttentionBackendError, BackendCapability
from attention.config import AttentionConfig
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.kernels.paged_decode import (
    DecodeGeometry,
    DecodePlan,
    PagedDecode,
    ScoreRule,
)
from attention.kernels.step_tables import StepTables
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_attention_backend


class TritonDecoder:
    """Decode attention of a model's layers over a pool; each window's first layer plans for all."""

    def __init__(self, config: AttentionConfig, token_to_kv_pool: TokenToKVPool) -> None:
        if config.v_head_dim != config.head_dim:
            raise AttentionBackendError(
                "Triton decode needs K and V heads of one size, "
                f"this model has {config.head_dim} and {config.v_head_dim}"
            )
        self._pool = token_to_kv_pool
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
        lengths = metadata.cache_seqlens_int32
        return self._decode.attend(
            q,
            self._pool.get_kv_buffer(layer.layer_id),
            metadata.page_table,
            lengths,
            self._plan(layer, lengths),
            ScoreRule(layer.scaling, layer.logit_cap, layer.sinks),
        )

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
        self._decoder = TritonDecoder(config, token_to_kv_pool)

    def _start_step(self, tables: StepTables, facts: StepFacts) -> None:
        super()._start_step(tables, facts)
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
