"""Launches the Triton decode kernels: one plan a step, two launches a layer, and no wait for any.

Knows the geometry of one rank's heads and the device's width, no batch and no pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from attention.kernels.providers import load_decode_kernels

CHUNKS_PER_MULTIPROCESSOR = 4
"""Enough programs that their ends do not fall together, and as many as fit at once."""
MIN_CHUNK_TOKENS = 128
DEPENDENT_LAUNCH = True
"""Start a kernel while its predecessor ends; each waits for it before it reads anything."""
_PLAN_HEADER = 4
_CHUNK_FIELDS = 4
_ROW_FIELDS = 2
_MIN_TILE = 16  # of a tensor-core product
_WIDE_HEAD_DIM = 128
_MAX_JOINED_CHUNKS = 16
_MAX_JOINED_ELEMENTS = 8192
_UNLIMITED = 1 << 30


class DecodeShape(NamedTuple):
    """What a decode kernel is compiled for. group: query heads a KV head. tile_*: padded to what
    the hardware multiplies. partial_size: float32 elements of a chunk's partial result."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    has_window: bool
    has_cap: bool
    has_sinks: bool
    block_keys: int
    has_whole_blocks: bool
    tile_rows: int
    tile_group: int
    tile_dim: int
    block_chunks: int
    partial_size: int


@dataclass(frozen=True, slots=True)
class DecodeGeometry:
    """Heads of one rank, head_dim elements for K and V alike, in pages of page_size tokens."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int

    def shape(self, has_window: bool, has_cap: bool, has_sinks: bool) -> DecodeShape:
        """The kernel for layers with or without a window, a logit cap and sinks."""
        block_keys = 64 if self.head_dim <= _WIDE_HEAD_DIM else 32
        tile_group = _next_power_of_2(self.group)
        tile_dim = max(_MIN_TILE, _next_power_of_2(self.head_dim))
        return DecodeShape(
            kv_heads=self.kv_heads,
            group=self.group,
            head_dim=self.head_dim,
            page_size=self.page_size,
            has_window=has_window,
            has_cap=has_cap,
            has_sinks=has_sinks,
            block_keys=block_keys,
            has_whole_blocks=self.page_size % block_keys == 0,
            tile_rows=max(_MIN_TILE, tile_group),
            tile_group=tile_group,
            tile_dim=tile_dim,
            block_chunks=max(
                1, min(_MAX_JOINED_CHUNKS, _MAX_JOINED_ELEMENTS // (tile_group * tile_dim))
            ),
            partial_size=self.group * (self.head_dim + 2),
        )


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a step's rows are cut, for layers of one window and the lengths it was made from;
    triton_decode.py says the layout."""

    tensor: torch.Tensor
    max_items: int
    window: int


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """What becomes of a layer's scores. scaling: their factor. logit_cap: 0 for none. sinks: float
    (q_heads,) or None."""

    scaling: float
    logit_cap: float
    sinks: torch.Tensor | None


class PagedDecode:
    """Decode attention over pages of one geometry on one device."""

    def __init__(self, geometry: DecodeGeometry, device: torch.device) -> None:
        self._geometry = geometry
        self._kernels = load_decode_kernels()
        programs = num_multiprocessors(device) * CHUNKS_PER_MULTIPROCESSOR
        self._target_chunks = -(-programs // geometry.kv_heads)

    def plan(self, cache_seqlens: torch.Tensor, sliding_window_size: int) -> DecodePlan:
        """cache_seqlens int32 (bs,), bs >= 1; sliding_window_size: -1 for none."""
        num_rows = cache_seqlens.shape[0]
        # A row's chunks are at most one more than its share of target_chunks.
        max_items = num_rows + self._target_chunks
        window = sliding_window_size if sliding_window_size > 0 else _UNLIMITED
        size = _PLAN_HEADER + max_items * _CHUNK_FIELDS + num_rows * _ROW_FIELDS
        plan = torch.empty(size, dtype=torch.int32, device=cache_seqlens.device)
        self._kernels.plan_chunks[(1,)](
            cache_seqlens,
            plan,
            num_rows,
            max_items,
            window,
            self._target_chunks,
            MIN_CHUNK_TOKENS,
            shape=self._geometry.shape(has_window=False, has_cap=False, has_sinks=False),
            block_rows=_next_power_of_2(num_rows),
        )
        return DecodePlan(plan, max_items, window)

    def attend(
        self,
        q: torch.Tensor,
        kv_pages: tuple[torch.Tensor, torch.Tensor],
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        plan: DecodePlan,
        rule: ScoreRule,
    ) -> torch.Tensor:
        """q (bs, q_heads, head_dim), its heads dense -> (bs, q_heads, head_dim), all in one dtype.

        kv_pages: K and V (num_pages, page_size, kv_heads, head_dim), contiguous; page_table int32
        (bs, >= pages of the longest row), every entry a page that exists.
        """
        shape = self._geometry.shape(
            plan.window < _UNLIMITED, rule.logit_cap > 0.0, rule.sinks is not None
        )
        num_rows = q.shape[0]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        num_partials = plan.max_items * shape.kv_heads
        partials = torch.empty(
            num_partials * shape.partial_size, dtype=torch.float32, device=q.device
        )
        sinks = q if rule.sinks is None else rule.sinks
        self._kernels.attend_chunk[(plan.max_items, shape.kv_heads)](
            q,
            q.stride(0),
            *kv_pages,
            page_table,
            page_table.stride(0),
            cache_seqlens,
            plan.tensor,
            sinks,
            partials,
            out,
            plan.max_items,
            plan.window,
            rule.scaling,
            rule.logit_cap,
            shape=shape,
            num_warps=4,
            num_stages=3,
            launch_pdl=DEPENDENT_LAUNCH,
        )
        self._kernels.join_row[(num_rows, shape.kv_heads)](
            plan.tensor,
            sinks,
            partials,
            out,
            plan.max_items,
            shape=shape,
            num_warps=4,
            launch_pdl=DEPENDENT_LAUNCH,
        )
        return out


def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
