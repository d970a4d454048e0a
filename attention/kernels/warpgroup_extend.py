"""Launches the Gluon extend kernel where it is faster, the plain one everywhere else.

Knows the geometry of one rank's heads and the device's limits, no batch and no pool.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from attention.kernels.extend_shape import FEW_KEYS, ExtendGeometry
from attention.kernels.gluon_shape import (
    TILE_ROWS,
    TUNING,
    GluonTuning,
    covers,
    gluon_shape,
)
from attention.kernels.gpu_limits import GpuLimits
from attention.kernels.paged_decode import ScoreRule
from attention.kernels.paged_extend import ExtendRows, PagedExtend, PagedKeys, SeenKeys
from attention.kernels.providers import load_gluon_extend, probe_gluon
from attention.visibility import Causal

_PARENT_WARPS = 4
"""A warpgroup; the kernel adds another one and the warp that brings the keys."""

logger = logging.getLogger(__name__)


def make_extend(geometry: ExtendGeometry, dtype: torch.dtype, limits: GpuLimits) -> PagedExtend:
    """What attends prompts of these heads here. ValueError where no tiles fit the device."""
    if TUNING is None or not covers(geometry, dtype, limits):
        return PagedExtend(geometry, limits)
    probe = probe_gluon()
    if not probe.is_available:
        logger.info("prompts take the plain Triton kernel: %s", probe.missing)
        return PagedExtend(geometry, limits)
    return WarpgroupExtend(geometry, limits, TUNING)


class WarpgroupExtend(PagedExtend):
    """Causal rows with many new tokens by warpgroups, all others as PagedExtend."""

    def __init__(self, geometry: ExtendGeometry, limits: GpuLimits, tuning: GluonTuning) -> None:
        """Needs gluon_shape.covers and probe_gluon. ValueError as PagedExtend."""
        super().__init__(geometry, limits)
        self._gluon = load_gluon_extend()
        self._shape = gluon_shape(geometry, tuning)
        self._descriptors: dict[int, Any] = {}

    def attend(
        self,
        q: torch.Tensor,
        keys: PagedKeys,
        rows: ExtendRows,
        seen: SeenKeys,
        rule: ScoreRule,
        out: torch.Tensor,
        q_rope: torch.Tensor | None = None,
    ) -> None:
        if not (_is_plain(seen, rule) and self._pays(len(q), rows)):
            super().attend(q, keys, rows, seen, rule, out, q_rope)
            return
        num_tiles = self._count_tiles(len(q), rows, TILE_ROWS)
        self._gluon.attend[(self._shape.kv_heads, num_tiles)](
            q,
            q.stride(0),
            self._describe(keys.k),
            self._describe(keys.v),
            rows.page_table,
            rows.page_table.stride(0),
            rows.cu_seqlens_q,
            rows.cache_seqlens,
            out,
            len(rows.cache_seqlens),
            rule.scaling,
            shape=self._shape,
            num_warps=_PARENT_WARPS,
        )

    def _pays(self, num_tokens: int, rows: ExtendRows) -> bool:
        """Whether rows fill tiles and have some blocks of keys for each, and tiles fill the
        multiprocessors without parts of their keys."""
        if num_tokens == 0 or len(rows.cache_seqlens) == 0 or rows.max_keys <= FEW_KEYS:
            return False
        fills = rows.max_new_tokens * self._shape.group >= TILE_ROWS
        num_tiles = self._count_tiles(num_tokens, rows, TILE_ROWS)
        return fills and self._num_splits(num_tiles, rows.max_keys) == 1

    def _describe(self, pages: torch.Tensor) -> Any:
        """K or V of a layer as copies read it; a layer's pages stay where they are."""
        found = self._descriptors.get(pages.data_ptr())
        if found is None:
            found = self._gluon.describe(pages, self._shape.box_keys)
            self._descriptors[pages.data_ptr()] = found
        return found


def _is_plain(seen: SeenKeys, rule: ScoreRule) -> bool:
    """Whether new tokens see all keys up to their own, and scores are only scaled."""
    sees_all = isinstance(seen.visibility, Causal) and seen.window <= 0
    return sees_all and rule.logit_cap <= 0.0 and rule.sinks is None and rule.scaling > 0.0
