"""What the Gluon extend kernel is compiled for, and what it covers. Numbers only: no Triton."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from attention.kernels.extend_shape import ExtendGeometry
from attention.kernels.gpu_limits import GpuLimits

TILE_ROWS = 128
"""Pairs of a new token and a query head that a program has."""
_COMPUTE_CAPABILITY = (9, 0)
_HEAD_DIMS = (64, 128)
_DTYPES = (torch.bfloat16, torch.float16)
_MIN_PAGE_SIZE = 16


class GluonShape(NamedTuple):
    """group: query heads a KV head. block_keys: keys that are multiplied at once. box_keys: those
    that one copy brings, all of one page. num_stages: blocks of K, and of V, on their way."""

    kv_heads: int
    group: int
    head_dim: int
    page_size: int
    block_keys: int
    box_keys: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class GluonTuning:
    """How the kernel runs, as GluonShape; benchmarks/h200/extend_variants.py times several."""

    block_keys: int = 128
    num_stages: int = 2


TUNING: GluonTuning | None = GluonTuning()
"""What is served with; None has the plain kernel everywhere."""


def covers(geometry: ExtendGeometry, dtype: torch.dtype, limits: GpuLimits) -> bool:
    """Whether the kernel is for these heads and pages on this GPU."""
    page_size = geometry.page_size
    return (
        limits.compute_capability == _COMPUTE_CAPABILITY
        and dtype in _DTYPES
        and not geometry.is_e4m3
        and geometry.rope_dim == 0
        and geometry.head_dim == geometry.v_head_dim
        and geometry.head_dim in _HEAD_DIMS
        and page_size >= _MIN_PAGE_SIZE
        and page_size & (page_size - 1) == 0
    )


def gluon_shape(geometry: ExtendGeometry, tuning: GluonTuning) -> GluonShape:
    return GluonShape(
        kv_heads=geometry.kv_heads,
        group=geometry.group,
        head_dim=geometry.head_dim,
        page_size=geometry.page_size,
        block_keys=tuning.block_keys,
        box_keys=min(geometry.page_size, tuning.block_keys),
        num_stages=tuning.num_stages,
    )
