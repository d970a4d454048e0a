"""What the Triton extend kernel is compiled for, and which tiles a GPU has room for.

Numbers only: no tensor, no device and no Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from attention.kernels.decode_shape import next_power_of_2
from attention.kernels.gpu_limits import GpuLimits

_MIN_TILE = 16  # of a tensor-core product
_MIN_IN_PLACE_ROWS = 64
_PLACE_BYTES = 4
_RESERVED_BYTES = 3 << 10
"""Of shared memory: the driver's own (1 KiB a program) and a compiler's barriers and sums."""


class ExtendShape(NamedTuple):
    """What an extend kernel is compiled for.

    group: query heads a KV head. head_dim: of K; v_head_dim: of V. rope_dim: above 0, K is a latent
    of head_dim elements that is V too, and rope_dim more of a rotated part. token_stride,
    v_token_stride: elements from a token's K or V to the next one's. is_e4m3: K and V are bytes of
    e4m3. is_split: several programs share a tile's keys. masks_all: no block of keys is taken for
    one that every pair sees. tile_*: padded to what is multiplied.
    """

    kv_heads: int
    group: int
    head_dim: int
    v_head_dim: int
    rope_dim: int
    token_stride: int
    v_token_stride: int
    page_size: int
    has_window: bool
    has_cap: bool
    has_sinks: bool
    is_tree: bool
    is_items: bool
    is_everything: bool
    is_e4m3: bool
    is_split: bool
    tile_rows: int
    tile_dim: int
    tile_v_dim: int
    tile_rope_dim: int
    block_keys: int
    has_whole_blocks: bool
    masks_all: bool = False


@dataclass(frozen=True, slots=True)
class ExtendTiles:
    """How a kernel runs. tile_rows: pairs of a new token and a query head that a program has.
    block_keys: keys that it holds at once. num_stages: blocks on their way at once."""

    tile_rows: int
    block_keys: int
    num_stages: int


CANDIDATES = (
    ExtendTiles(128, 64, 3),
    ExtendTiles(128, 64, 2),
    ExtendTiles(64, 64, 3),
    ExtendTiles(64, 64, 2),
    ExtendTiles(64, 32, 2),
    ExtendTiles(32, 64, 3),
    ExtendTiles(32, 64, 2),
    ExtendTiles(32, 32, 2),
    ExtendTiles(16, 64, 3),
    ExtendTiles(16, 64, 2),
    ExtendTiles(16, 32, 2),
    ExtendTiles(16, 16, 2),
    ExtendTiles(16, 16, 1),
)
"""The first that fits is taken; benchmarks/h200/extend_sweep.py times them."""
FEW_KEYS = 256
"""Rows of so many at most are a few blocks for each tile, whose beginning and end are what takes
the time: small tiles, several of which share a multiprocessor, hide one another's."""
FOR_FEW_KEYS = (ExtendTiles(64, 32, 2),)
FOR_SPLIT_KEYS = (ExtendTiles(64, 64, 3),)
"""Taken before CANDIDATES where they fit: of rows with few keys, and where programs share a tile's
keys. H200, 2026-11-28: 1.9 and 1.3 times as fast as the first of these."""
FOR_SPLIT_TREES = (ExtendTiles(32, 64, 3),)
"""The same of trees: a tile's cells of masks take longer than its keys. H200, 2026-11-28, one row,
in a trace: 9 us with tiles of 32 pairs, 18 with tiles of 64 over as many keys."""
_MAX_ACCUMULATED = 128 * 128
"""float32 elements of a tile's result: eight warps' registers hold no more beside its scores."""


@dataclass(frozen=True, slots=True)
class ExtendGeometry:
    """Heads of one rank. rope_dim: as ExtendShape. element_bytes: of what queries are. is_e4m3: as
    ExtendShape."""

    kv_heads: int
    group: int
    head_dim: int
    v_head_dim: int
    page_size: int
    element_bytes: int = 2
    rope_dim: int = 0
    is_e4m3: bool = False

    @property
    def num_q_heads(self) -> int:
        return self.kv_heads * self.group

    def tiles(
        self,
        max_new_tokens: int,
        limits: GpuLimits,
        is_tree: bool = False,
        preferred: Sequence[ExtendTiles] = (),
    ) -> ExtendTiles:
        """For a step whose rows have at most so many new tokens, one of the preferred if it fits.
        ValueError where none fits."""
        pairs = max(_MIN_TILE, next_power_of_2(max_new_tokens * self.group))
        for tiles in (*preferred, *CANDIDATES):
            is_wide = self.accumulated(tiles) > _MAX_ACCUMULATED
            fits = self.shared_bytes(tiles, limits, is_tree) <= limits.shared_bytes
            if tiles.tile_rows <= pairs and fits and not is_wide:
                return tiles
        raise ValueError(f"no tiles of heads of {self.head_dim} fit {limits.shared_bytes} bytes")

    def accumulated(self, tiles: ExtendTiles) -> int:
        """float32 elements of a tile's result."""
        return tiles.tile_rows * _tile(self.v_head_dim)

    def num_warps(self, tiles: ExtendTiles) -> int:
        return 8 if self.accumulated(tiles) == _MAX_ACCUMULATED else 4

    def shared_bytes(self, tiles: ExtendTiles, limits: GpuLimits, is_tree: bool = False) -> int:
        """At most what a compiled program takes: blocks of K and V on their way, the queries, and a
        block's weights."""
        rows, keys = tiles.tile_rows, tiles.block_keys
        dims = _tile(self.head_dim) + (_tile(self.rope_dim) if self.rope_dim else 0)
        values = 0 if self.rope_dim else _tile(self.v_head_dim)
        kv_bytes = 1 if self.is_e4m3 else self.element_bytes
        # Where products read registers, a block leaves its place when its own turn begins.
        is_read_in_place = limits.multiplies_from_shared_memory and rows >= _MIN_IN_PLACE_ROWS
        num_blocks = tiles.num_stages if is_read_in_place else max(1, tiles.num_stages - 1)
        blocks = num_blocks * keys * (dims + values) * kv_bytes
        if self.is_e4m3:
            blocks += keys * (dims + values) * self.element_bytes
        operands = (rows * dims + rows * keys) * self.element_bytes
        # A block's cells of a tree's masks are on their way beside it, their places changed once.
        masks = rows * keys * (num_blocks + _PLACE_BYTES) if is_tree else 0
        return blocks + operands + masks + _RESERVED_BYTES

    def shape(
        self,
        tiles: ExtendTiles,
        *,
        has_window: bool = False,
        has_cap: bool = False,
        has_sinks: bool = False,
        is_tree: bool = False,
        is_items: bool = False,
        is_everything: bool = False,
        is_split: bool = False,
    ) -> ExtendShape:
        """The kernel for a layer and a step of that kind."""
        token_stride = self.kv_heads * self.head_dim + self.rope_dim
        return ExtendShape(
            kv_heads=self.kv_heads,
            group=self.group,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            rope_dim=self.rope_dim,
            token_stride=token_stride,
            v_token_stride=token_stride if self.rope_dim else self.kv_heads * self.v_head_dim,
            page_size=self.page_size,
            has_window=has_window,
            has_cap=has_cap,
            has_sinks=has_sinks,
            is_tree=is_tree,
            is_items=is_items,
            is_everything=is_everything,
            is_e4m3=self.is_e4m3,
            is_split=is_split,
            tile_rows=tiles.tile_rows,
            tile_dim=_tile(self.head_dim),
            tile_v_dim=_tile(self.v_head_dim),
            tile_rope_dim=_tile(max(self.rope_dim, 1)),
            block_keys=tiles.block_keys,
            has_whole_blocks=self.page_size % tiles.block_keys == 0,
        )


def _tile(dim: int) -> int:
    return max(_MIN_TILE, next_power_of_2(dim))
