"""Launches the Triton decode kernels: one plan a step, one launch a layer, and no wait for any.

Knows the geometry of one rank's heads and the device's width, no batch and no pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attention.kernels.decode_shape import (
    DecodeGeometry,
    DecodeShape,
    DecodeTuning,
    FrontShape,
    most_waves,
    next_power_of_2,
)
from attention.kernels.gpu_limits import gpu_limits
from attention.kernels.providers import load_decode_kernels
from attention.qkv_projection import QKVProjection

_PLAN_HEADER = 8
_CHUNK_FIELDS = 8
_UNLIMITED = 1 << 30
_PLAN_WARPS = 8
_MAX_COMPARED_ROWS = 32
_MAX_COMPARISONS = 8192


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a step's rows are cut, for layers of one window and the lengths it was made from;
    triton_decode_plan.py says the layout."""

    tensor: torch.Tensor
    max_items: int
    window: int
    tuning: DecodeTuning


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """What becomes of a layer's scores. scaling: their factor. logit_cap: 0 for none. sinks: float
    (q_heads,) or None."""

    scaling: float
    logit_cap: float
    sinks: torch.Tensor | None


class PagedDecode:
    """Decode attention over pages of one geometry on one device."""

    def __init__(
        self,
        geometry: DecodeGeometry,
        device: torch.device,
        tuning_of: Callable[[int], DecodeTuning],
    ) -> None:
        """tuning_of: the constants for a step of some number of rows."""
        self._geometry = geometry
        self._tuning_of = tuning_of
        self._kernels = load_decode_kernels()
        limits = gpu_limits(device)
        self._num_multiprocessors = limits.num_multiprocessors
        # Start a kernel while its predecessor ends; each waits before it uses its results.
        self._is_dependent = limits.has_dependent_launch

    @property
    def can_fuse_projection(self) -> bool:
        """Whether there is a kernel from the projection on: it starts while the projection ends."""
        return self._is_dependent and self._geometry.can_fuse_projection

    def plan(self, cache_seqlens: torch.Tensor, sliding_window_size: int) -> DecodePlan:
        """cache_seqlens int32 (bs,), bs >= 1; sliding_window_size: -1 for none. One launch."""
        num_rows, kv_heads = cache_seqlens.shape[0], self._geometry.kv_heads
        tuning = self._tuning_of(num_rows)
        programs = self._num_multiprocessors * tuning.chunks_per_multiprocessor
        target_chunks = -(-programs // kv_heads)
        max_waves = most_waves(num_rows, target_chunks)
        # A row's chunks are at most one more than its share of all waves' places.
        max_items = num_rows + max_waves * target_chunks
        window = sliding_window_size if sliding_window_size > 0 else _UNLIMITED
        size = _PLAN_HEADER + max_items * _CHUNK_FIELDS + num_rows * kv_heads
        plan = torch.empty(size, dtype=torch.int32, device=cache_seqlens.device)
        block_rows = next_power_of_2(num_rows)
        compared_rows = max(1, min(_MAX_COMPARED_ROWS, block_rows, _MAX_COMPARISONS // block_rows))
        self._kernels.plan_chunks[(1,)](
            cache_seqlens,
            plan,
            num_rows,
            max_items,
            window,
            target_chunks,
            tuning.min_chunk_tokens,
            tuning.slack_eighths,
            block_keys=tuning.block_keys,
            kv_heads=kv_heads,
            block_rows=block_rows,
            compared_rows=compared_rows,
            max_waves=max_waves,
            is_dependent=self._is_dependent,
            num_warps=_PLAN_WARPS,
            launch_pdl=self._is_dependent,
        )
        return DecodePlan(plan, max_items, window, tuning)

    def attend(
        self,
        q: torch.Tensor,
        kv_pages: tuple[torch.Tensor, torch.Tensor],
        page_table: torch.Tensor,
        plan: DecodePlan,
        rule: ScoreRule,
    ) -> torch.Tensor:
        """q (bs, q_heads, head_dim), its heads dense -> (bs, q_heads, head_dim), all in one dtype.

        kv_pages: K and V (num_pages, page_size, kv_heads, head_dim), contiguous; page_table int32
        (bs, >= pages of the longest row), every entry a page that exists.
        """
        shape = self._shape(plan, rule)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._kernels.attend_chunk[(shape.kv_heads, plan.max_items)](
            q,
            q.stride(0),
            *kv_pages,
            page_table,
            page_table.stride(0),
            plan.tensor,
            q if rule.sinks is None else rule.sinks,
            _partials(plan, shape, q.device),
            out,
            plan.max_items,
            plan.window,
            rule.scaling,
            rule.logit_cap,
            shape=shape,
            num_warps=plan.tuning.num_warps,
            num_stages=plan.tuning.num_stages,
            launch_pdl=self._is_dependent,
        )
        return out

    def attend_projected(
        self,
        projection: QKVProjection,
        out_cache_loc: torch.Tensor,
        kv_pages: tuple[torch.Tensor, torch.Tensor],
        page_table: torch.Tensor,
        plan: DecodePlan,
        rule: ScoreRule,
    ) -> torch.Tensor:
        """As attend, from the rows' projection on: also writes k and v to out_cache_loc, an integer
        tensor (bs,). A row's position is its number of keys less one.

        The plan and the page table must be complete before the launch that comes before this one
        begins: they are read while that one still runs. Needs can_fuse_projection.
        """
        shape = self._shape(plan, rule)
        projected, rotation = projection.partials, projection.rotation
        num_splits, num_rows, width = projected.shape
        norm = rotation.head_norm
        out = torch.empty(
            (num_rows, self._geometry.num_q_heads, shape.head_dim),
            dtype=projection.dtype,
            device=projected.device,
        )
        front = FrontShape(
            num_splits=num_splits,
            has_bias=rotation.bias is not None,
            has_norm=norm is not None,
            prefetch_keys=plan.tuning.prefetch_keys,
            loads_early=plan.tuning.loads_early,
        )
        self._kernels.attend_projected[(shape.kv_heads, plan.max_items)](
            projected,
            num_rows * width,
            projected if rotation.bias is None else rotation.bias,
            projected if norm is None else norm.q_weight,
            projected if norm is None else norm.k_weight,
            0.0 if norm is None else norm.eps,
            rotation.cos_sin,
            out_cache_loc,
            *kv_pages,
            page_table,
            page_table.stride(0),
            plan.tensor,
            projected if rule.sinks is None else rule.sinks,
            _partials(plan, shape, projected.device),
            out,
            plan.max_items,
            plan.window,
            rule.scaling,
            rule.logit_cap,
            shape=shape,
            front=front,
            num_warps=plan.tuning.num_warps,
            num_stages=plan.tuning.num_stages,
            launch_pdl=self._is_dependent,
        )
        return out

    def _shape(self, plan: DecodePlan, rule: ScoreRule) -> DecodeShape:
        return self._geometry.shape(
            plan.tuning,
            plan.window < _UNLIMITED,
            rule.logit_cap > 0.0,
            rule.sinks is not None,
            self._is_dependent,
        )


def _partials(plan: DecodePlan, shape: DecodeShape, device: torch.device) -> torch.Tensor:
    """Room for a partial result of every chunk and KV head."""
    size = plan.max_items * shape.kv_heads * shape.partial_size
    return torch.empty(size, dtype=torch.float32, device=device)
