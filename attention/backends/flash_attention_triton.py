"""FlashAttention-3 for prefill and mixed steps, this repository's Triton kernel for decode steps.

What Hopper gets by default for 16-bit pools: on an H200 it decodes about as fast as
FlashAttention-3 or faster, but for one long row and for rows of very unlike lengths. It can begin
with the QKV projection: it then rotates, writes K and V and attends in one launch. K and V heads
must be of one size. docs/performance.md compares the two ways to decode.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.flash_attention_metadata import StepFacts
from attention.backends.flash_attention_steps import AccountTables
from attention.backends.triton_decoder import TritonDecoder
from attention.capability import BackendCapability
from attention.config import AttentionConfig
from attention.features import Feature
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.kernels.decode_shape import DecodeGeometry, DecodeTuning, measured_tuning
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.qkv_projection import QKVProjection
from attention.registration import register_attention_backend


@register_attention_backend("fa3_triton")
class TritonDecodeFlashAttentionBackend(FlashAttentionBackend):
    """FlashAttention-3 with Triton decode over a pool of the model's dtype."""

    capability: BackendCapability = replace(
        FlashAttentionBackend.capability,
        name="fa3_triton",
        has_unequal_head_dims=False,
        has_mla=False,
        why_not={
            **FlashAttentionBackend.capability.why_not,
            Feature.UNEQUAL_HEAD_DIMS: "the decode kernels know heads of one size; fa3 knows more",
            Feature.MLA: "the decode kernels attend over heads; fa3 reads latents",
        },
    )

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._decoder = TritonDecoder(config, token_to_kv_pool, self.tuning_of)

    @staticmethod
    def tuning_of(geometry: DecodeGeometry, num_rows: int) -> DecodeTuning:
        """The decode kernel's constants for some heads and number of rows."""
        return measured_tuning(geometry, num_rows)

    def fuses_decode_projection(self, num_rows: int) -> bool:
        return self._decoder.fuses_projection(num_rows)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._plan_decoding(forward_batch)

    def record_step_tables(self, forward_batch: ForwardBatch) -> None:
        super().record_step_tables(forward_batch)
        self._plan_decoding(forward_batch)

    def _plan_decoding(self, forward_batch: ForwardBatch) -> None:
        """Of steps with other rows FlashAttention-3 attends to all."""
        if forward_batch.forward_mode.is_decode and forward_batch.batch_size:
            self._decoder.plan(self._cache_seqlens())

    def _start_step(self, tables: AccountTables, facts: StepFacts) -> None:
        super()._start_step(tables, facts)
        self._decoder.forget_plans()

    def _cache_seqlens(self) -> torch.Tensor:
        """All windows' metadata share their lengths."""
        return next(iter(self._metadata.values())).cache_seqlens_int32

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
        if metadata.batch_size == 0:
            return torch.empty_like(q)
        return self._decoder.attend(q, layer, metadata)

    def forward_projected(
        self, projection: QKVProjection, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """One launch. Whatever is launched between the step's metadata and the first layer must
        hold at least one ordinary launch, as an embedding lookup is: see attend_projected."""
        if not self._decoder.can_fuse_projection:
            return super().forward_projected(projection, layer, forward_batch)
        metadata = self._step_metadata(layer)
        return self._decoder.attend_projected(
            projection, self._places(layer, forward_batch), layer, metadata
        )
