"""Launches the Triton decode kernels: one plan a step, then one launch a layer, both without a sync.

Knows the geometry of one rank's heads and the device's width, no batch and no pool.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from attention.kernels.providers import load_decode_kernels

CHUNKS_PER_MULTIPROCESSOR = 4
"""Enough programs that their ends do not fall together; two fit on a multiprocessor at once."""
MIN_CHUNK_TOKENS = 128
_PLAN_HEADER = 2
_MIN_TILE_ROWS = 16  # of a tensor-core product
_WIDE_HEAD_DIM = 128
_JOINED_ELEMENTS = 8192
_UNLIMITED = 1 << 30


@dataclass(frozen=True, slots=True)
class DecodeGeometry:
    """Heads of one rank, head_dim elements for K and V alike, in pages of page_size tokens."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int

    @property
    def block_keys(self) -> int:
        """Keys a program reads at once: 32 KiB of K and V in 16 bits, for narrow heads fewer."""
        return 64 if self.head_dim <= _WIDE_HEAD_DIM else 32

    @property
    def constants(self) -> dict[str, int]:
        """The attention kernel's compile-time arguments."""
        tile_group = _next_power_of_2(self.group)
        tile_dim = _next_power_of_2(self.head_dim)
        return {
            "page_size": self.page_size,
            "kv_heads": self.kv_heads,
            "group": self.group,
            "head_dim": self.head_dim,
            "tile_rows": max(_MIN_TILE_ROWS, tile_group),
            "tile_group": tile_group,
            "tile_dim": max(_MIN_TILE_ROWS, tile_dim),
            "block_keys": self.block_keys,
            "block_chunks": max(1, min(16, _JOINED_ELEMENTS // (tile_group * tile_dim))),
        }


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """How a step's rows are cut, for layers of one window; triton_decode.py says the layout.

    Holds for the lengths it was made from, and is written to by each layer: layers that share it
    run one after the other.
    """

    tensor: torch.Tensor
    max_items: int
    window: int


@dataclass(frozen=True, slots=True)
class DecodeScales:
    """What a layer multiplies scores and stored values by. Scales: float32, one element, on the
    device. logit_cap: 0 for none. sinks: (q_heads,) or None."""

    scaling: float
    logit_cap: float
    sinks: torch.Tensor | None
    k_scale: torch.Tensor
    v_scale: torch.Tensor


class PagedDecode:
    """Decode attention over pages of one geometry on one device."""

    def __init__(self, geometry: DecodeGeometry, device: torch.device) -> None:
        self._geometry = geometry
        self._constants = geometry.constants
        self._kernels = load_decode_kernels()
        programs = num_multiprocessors(device) * CHUNKS_PER_MULTIPROCESSOR
        self._target_chunks = -(-programs // geometry.kv_heads)

    def plan(self, cache_seqlens: torch.Tensor, sliding_window_size: int) -> DecodePlan:
        """cache_seqlens int32 (bs,), bs >= 1; sliding_window_size: -1 for none."""
        num_rows, kv_heads = cache_seqlens.shape[0], self._geometry.kv_heads
        # Every row is a chunk, and full chunks are at most target_chunks.
        max_items = num_rows + self._target_chunks
        window = sliding_window_size if sliding_window_size > 0 else _UNLIMITED
        size = _PLAN_HEADER + max_items + num_rows * (1 + kv_heads)
        plan = torch.empty(size, dtype=torch.int32, device=cache_seqlens.device)
        self._kernels.plan_chunks[(1,)](
            cache_seqlens,
            plan,
            num_rows,
            max_items,
            window,
            self._target_chunks,
            kv_heads=kv_heads,
            min_chunk=MIN_CHUNK_TOKENS,
            block_keys=self._geometry.block_keys,
            block_rows=_next_power_of_2(num_rows),
        )
        return DecodePlan(plan, max_items, window)

    def attend(
        self,
        q: torch.Tensor,
        k_pages: torch.Tensor,
        v_pages: torch.Tensor,
        page_table: torch.Tensor,
        cache_seqlens: torch.Tensor,
        plan: DecodePlan,
        scales: DecodeScales,
    ) -> torch.Tensor:
        """q (bs, q_heads, head_dim), its heads dense -> (bs, q_heads, head_dim) in q's dtype.

        k_pages, v_pages (num_pages, page_size, kv_heads, head_dim), contiguous, of q's dtype or
        float8_e4m3fn; page_table int32 (bs, >= pages of the longest row).
        """
        geometry = self._geometry
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        cells = geometry.group * (geometry.head_dim + 2)
        partials = torch.empty(
            plan.max_items * geometry.kv_heads * cells, dtype=torch.float32, device=q.device
        )
        self._kernels.attend_chunk[(geometry.kv_heads, plan.max_items)](
            q,
            q.stride(0),
            k_pages,
            v_pages,
            page_table,
            page_table.stride(0),
            cache_seqlens,
            plan.tensor,
            scales.k_scale,
            scales.v_scale,
            q if scales.sinks is None else scales.sinks,
            partials,
            out,
            q.shape[0],
            plan.max_items,
            plan.window,
            scales.scaling,
            scales.logit_cap,
            has_cap=scales.logit_cap > 0.0,
            has_sinks=scales.sinks is not None,
            **self._constants,
            num_warps=4,
            num_stages=3,
            launch_pdl=True,
        )
        return out


def num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _next_power_of_2(value: int) -> int:
    return 1 << (value - 1).bit_length()
