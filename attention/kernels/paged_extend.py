"""Launches the Triton extend kernel: rows with any number of new tokens, one launch a layer.

One more launch joins the parts where few tiles would leave multiprocessors idle and several
programs share a tile's keys. Knows the geometry of one rank's heads and the device's limits, no
batch and no pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from attention.kernels.decode_shape import next_power_of_2
from attention.kernels.extend_shape import (
    FEW_KEYS,
    FOR_FEW_KEYS,
    FOR_SPLIT_KEYS,
    FOR_SPLIT_TREES,
    ExtendGeometry,
    ExtendShape,
    ExtendTiles,
)
from attention.kernels.gpu_limits import GpuLimits
from attention.kernels.paged_decode import ScoreRule
from attention.kernels.providers import load_extend_kernels
from attention.visibility import Everything, Items, Tree, Visibility

_PROGRAMS_PER_MULTIPROCESSOR = 2
_MIN_SPLIT_KEYS = 256
_MAX_SPLITS = 32
_MIN_TREE_SPLITS = 4
_JOIN_WARPS = 4
_INVARIANT_TILE_ROWS = 64
"""Prompts fill twice as many faster; a decode row fills a few and waits for memory."""


@dataclass(frozen=True, slots=True)
class ExtendRows:
    """A step's rows. cu_seqlens_q int32 (bs + 1,): where each row's new tokens begin in the step.
    cache_seqlens int32 (bs,): its keys, the new tokens' included. page_table int32 (bs, >= pages of
    the longest row), every entry a page that exists. max_new_tokens, max_keys: of a row, at most.
    """

    cu_seqlens_q: torch.Tensor
    cache_seqlens: torch.Tensor
    page_table: torch.Tensor
    max_new_tokens: int
    max_keys: int


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """What new tokens see. window: most recent positions, their own included; -1 for all.
    positions: int64 (num_tokens,), read of trees and items with windows only."""

    visibility: Visibility
    window: int
    positions: torch.Tensor


@dataclass(frozen=True, slots=True)
class PagedKeys:
    """K and V (num_pages, page_size, kv_heads, head_dim | v_head_dim), contiguous; V is K where
    they are latents. scales: float32 (2,), K's and V's, where they are bytes of e4m3."""

    k: torch.Tensor
    v: torch.Tensor
    scales: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class _Launch:
    """grid: tiles, KV heads, parts of a tile's keys."""

    shape: ExtendShape
    tiles: ExtendTiles
    grid: tuple[int, int, int]


class PagedExtend:
    """Attention over pages of one geometry on one device.

    masks_all: as ExtendShape.
    """

    masks_all: ClassVar[bool] = False

    def __init__(self, geometry: ExtendGeometry, limits: GpuLimits) -> None:
        """ValueError where no tiles fit the device."""
        self._geometry = geometry
        self._limits = limits
        self._kernels = load_extend_kernels()
        geometry.tiles(1, limits)

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
        """Fill out (num_tokens, q_heads, v_head_dim), contiguous, in tokens of the rows; those of
        rows without keys with zeros.

        q: (num_tokens, q_heads, head_dim), its heads dense; q_rope: as q, of the rotated part,
        where K is latents.
        """
        if len(q) == 0 or len(rows.cache_seqlens) == 0:
            return
        launch = self._launch(len(q), rows, seen, rule)
        partials = self._partials(launch, q)
        unused = rows.cache_seqlens
        rope = q if q_rope is None else q_rope
        self._kernels.attend_extend[launch.grid](
            q,
            q.stride(0),
            rope,
            rope.stride(0),
            keys.k,
            keys.v,
            rows.page_table,
            rows.page_table.stride(0),
            rows.cu_seqlens_q,
            rows.cache_seqlens,
            seen.positions,
            *_masks(seen.visibility, unused),
            unused if keys.scales is None else keys.scales,
            q if rule.sinks is None else rule.sinks,
            out if partials is None else partials,
            out,
            len(rows.cache_seqlens),
            len(q),
            max(seen.window, 0),
            rule.scaling,
            rule.logit_cap,
            shape=launch.shape,
            num_warps=self._geometry.num_warps(launch.tiles),
            num_stages=launch.tiles.num_stages,
        )
        if partials is not None:
            self._join(partials, rows, launch, rule, out)

    def _launch(
        self, num_tokens: int, rows: ExtendRows, seen: SeenKeys, rule: ScoreRule
    ) -> _Launch:
        geometry, visibility = self._geometry, seen.visibility
        is_tree = isinstance(visibility, Tree)
        can_split = not isinstance(visibility, Items)
        tiles = self._tiles(num_tokens, rows, is_tree, can_split)
        num_tiles = self._count_tiles(num_tokens, rows, tiles.tile_rows)
        num_splits = self._num_splits(num_tiles, rows.max_keys) if can_split else 1
        shape = geometry.shape(
            tiles,
            has_window=seen.window > 0,
            has_cap=rule.logit_cap > 0.0,
            has_sinks=rule.sinks is not None,
            is_tree=is_tree,
            is_items=isinstance(visibility, Items),
            is_everything=isinstance(visibility, Everything),
            is_split=num_splits > 1,
        )._replace(masks_all=self.masks_all)
        return _Launch(shape, tiles, (num_tiles, geometry.kv_heads, num_splits))

    def _tiles(
        self, num_tokens: int, rows: ExtendRows, is_tree: bool, can_split: bool
    ) -> ExtendTiles:
        """Of a step with so many tokens in all."""
        most, limits = rows.max_new_tokens, self._limits
        if rows.max_keys <= FEW_KEYS:
            return self._geometry.tiles(most, limits, is_tree, FOR_FEW_KEYS)
        tiles = self._geometry.tiles(most, limits, is_tree)
        num_tiles = self._count_tiles(num_tokens, rows, tiles.tile_rows)
        if can_split and self._num_splits(num_tiles, rows.max_keys) > 1:
            return self._split_tiles(num_tokens, rows, is_tree)
        return tiles

    def _split_tiles(self, num_tokens: int, rows: ExtendRows, is_tree: bool) -> ExtendTiles:
        """Of programs that share a tile's keys. Smaller tiles are more of them, and each reads all
        keys: trees have these where many programs share them nevertheless."""
        most, limits = rows.max_new_tokens, self._limits
        if is_tree:
            tiles = self._geometry.tiles(most, limits, is_tree, FOR_SPLIT_TREES)
            num_tiles = self._count_tiles(num_tokens, rows, tiles.tile_rows)
            if self._num_splits(num_tiles, rows.max_keys) >= _MIN_TREE_SPLITS:
                return tiles
        return self._geometry.tiles(most, limits, is_tree, FOR_SPLIT_KEYS)

    def _count_tiles(self, num_tokens: int, rows: ExtendRows, tile_rows: int) -> int:
        """At most. A row begins a tile of its own: see find_tile."""
        return num_tokens * self._geometry.group // tile_rows + len(rows.cache_seqlens)

    def _num_splits(self, num_tiles: int, max_keys: int) -> int:
        """How many programs share a tile's keys."""
        wanted = self._limits.num_multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
        wanted //= num_tiles * self._geometry.kv_heads
        return max(1, min(wanted, max_keys // _MIN_SPLIT_KEYS, _MAX_SPLITS))

    def _partials(self, launch: _Launch, q: torch.Tensor) -> torch.Tensor | None:
        """Room for a maximum, a sum and values of every part, new token and query head."""
        if not launch.shape.is_split:
            return None
        size = launch.grid[2], len(q), self._geometry.num_q_heads, self._geometry.v_head_dim + 2
        return torch.empty(size, dtype=torch.float32, device=q.device)

    def _join(
        self,
        partials: torch.Tensor,
        rows: ExtendRows,
        launch: _Launch,
        rule: ScoreRule,
        out: torch.Tensor,
    ) -> None:
        num_splits, num_tokens, num_heads, _ = partials.shape
        self._kernels.join_splits[(num_tokens, num_heads)](
            partials,
            rows.cu_seqlens_q,
            partials if rule.sinks is None else rule.sinks,
            out,
            len(rows.cache_seqlens),
            num_tokens,
            num_splits,
            block_splits=next_power_of_2(num_splits),
            shape=launch.shape,
            num_warps=_JOIN_WARPS,
        )


class InvariantExtend(PagedExtend):
    """The same, with results that do not depend on what shares the step nor on how many of a row's
    tokens are new: tiles of one size, whose keys one program has, in blocks that begin at multiples
    of their size and all go the same way. One that a pair does not see leaves its sums as they are.
    """

    masks_all: ClassVar[bool] = True

    def _tiles(
        self, num_tokens: int, rows: ExtendRows, is_tree: bool, can_split: bool
    ) -> ExtendTiles:
        most = max(1, _INVARIANT_TILE_ROWS // self._geometry.group)
        return self._geometry.tiles(most, self._limits, is_tree)

    def _num_splits(self, num_tiles: int, max_keys: int) -> int:
        return 1


def _masks(
    visibility: Visibility, unused: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """masks, mask_starts, shared_keys and first_own, as the kernel names them."""
    match visibility:
        case Tree(mask=mask, starts=starts):
            return mask.view(torch.uint8), starts, unused, unused
        case Items(shared_keys=shared, first_own=own):
            return unused, unused, shared, own
        case _:
            return unused, unused, unused, unused
