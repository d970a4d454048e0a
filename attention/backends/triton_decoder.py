"""Decode attention by the Triton kernels, for every backend that has it: a plan a step and window.

Knows the geometry of a model's layers and their pool, no request and no table.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from attention.backends.flash_attention_metadata import FlashAttentionMetadata
from attention.capability import AttentionBackendError
from attention.config import AttentionConfig
from attention.forward_batch import AttentionLayer
from attention.kernels.decode_shape import DecodeGeometry, DecodeTuning
from attention.kernels.paged_decode import DecodePlan, PagedDecode, ScoreRule
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.qkv_projection import QKVProjection

TuningOf = Callable[[DecodeGeometry, int], DecodeTuning]


class TritonDecoder:
    """Decode attention of a model's layers over a pool, by one plan a step for each window."""

    def __init__(
        self, config: AttentionConfig, token_to_kv_pool: TokenToKVPool, tuning_of: TuningOf
    ) -> None:
        if config.v_head_dim != config.head_dim:
            raise AttentionBackendError(
                "Triton decode needs K and V heads of one size, "
                f"this model has {config.head_dim} and {config.v_head_dim}"
            )
        self._pool = token_to_kv_pool
        self._windows = sorted({layer.sliding_window_size for layer in config.layers})
        self._plans: dict[int, DecodePlan] = {}
        self._geometry = DecodeGeometry(
            kv_heads=config.tp_k_head_num,
            group=config.tp_q_head_num // config.tp_k_head_num,
            head_dim=config.head_dim,
            page_size=token_to_kv_pool.page_size,
        )
        self._tuning_of = partial(tuning_of, self._geometry)
        self._decode = PagedDecode(self._geometry, config.device, self._tuning_of)

    @property
    def can_fuse_projection(self) -> bool:
        return self._decode.can_fuse_projection

    def fuses_projection(self, num_rows: int) -> bool:
        """Whether it also pays for a step of that many rows."""
        return self.can_fuse_projection and self._tuning_of(num_rows).fuses_projection

    def plan(self, cache_seqlens: torch.Tensor) -> None:
        """Cut a step's rows, int32 (bs,) keys each: a launch for each window."""
        self._plans = {window: self._decode.plan(cache_seqlens, window) for window in self._windows}

    def forget_plans(self) -> None:
        self._plans = {}

    def attend(
        self, q: torch.Tensor, layer: AttentionLayer, metadata: FlashAttentionMetadata
    ) -> torch.Tensor:
        """q (bs, tp_q_head_num, head_dim) -> the same shape and dtype."""
        return self._decode.attend(
            with_dense_heads(q),
            self._pool.get_kv_buffer(layer.layer_id),
            metadata.page_table,
            self._plan_of(layer),
            score_rule(layer),
        )

    def attend_projected(
        self,
        projection: QKVProjection,
        out_cache_loc: torch.Tensor,
        layer: AttentionLayer,
        metadata: FlashAttentionMetadata,
    ) -> torch.Tensor:
        """From the projection on; (bs, tp_q_head_num, head_dim)."""
        return self._decode.attend_projected(
            projection,
            out_cache_loc,
            self._pool.get_kv_buffer(layer.layer_id),
            metadata.page_table,
            self._plan_of(layer),
            score_rule(layer),
        )

    def _plan_of(self, layer: AttentionLayer) -> DecodePlan:
        plan = self._plans.get(layer.sliding_window_size)
        if plan is None:
            raise RuntimeError("a decode step's metadata must be made before its first layer")
        return plan


def with_dense_heads(q: torch.Tensor) -> torch.Tensor:
    """As the kernels read q (bs, q_heads, head_dim): a row's heads one behind the other. A model's
    code may leave them apart, as where it puts a rotated part and another one together."""
    return q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous()


def score_rule(layer: AttentionLayer) -> ScoreRule:
    return ScoreRule(layer.scaling, layer.logit_cap, layer.sinks)
