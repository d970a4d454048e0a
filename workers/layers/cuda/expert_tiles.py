"""Tiles of the experts' products by how many rows an expert gets on average.

Measured on an H200, those by maps with three models' sizes and 64 to 8,192 tokens (decision 0121):
benchmarks/h200/expert_candidates.py.
"""

import math
from dataclasses import replace

from workers.layers.cuda.expert_gemm import ExpertTiles
from workers.layers.cuda.expert_maps import MappedTiles, has_maps
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.routed_experts import RoutedWeights

_ITEM_BYTES = 2
_FEWEST_STAGES = 2
_GROUP = 12

Tiles = tuple[ExpertTiles, ExpertTiles]
"""Of activate and of project; both with the same block_rows."""

TileTable = tuple[tuple[float, Tiles], ...]
"""By the most rows, on average, that each is for."""

_SINGLE_ROWS: tuple[float, Tiles] = (
    1,
    (ExpertTiles(16, 64, 128, 3, 4), ExpertTiles(16, 64, 128, 5, 4)),
)

BY_POINTERS: TileTable = (
    _SINGLE_ROWS,
    (16, (ExpertTiles(16, 32, 256, 3, 4), ExpertTiles(16, 64, 128, 5, 4))),
    (32, (ExpertTiles(32, 64, 64, 4, 4), ExpertTiles(32, 128, 64, 4, 4))),
    (64, (ExpertTiles(64, 64, 64, 4, 4), ExpertTiles(64, 128, 64, 4, 4))),
    (math.inf, (ExpertTiles(128, 128, 64, 4, 8), ExpertTiles(128, 256, 64, 4, 8))),
)


def _mapped(
    rows: int, columns: int, depth: int, stages: int, warps: int, is_swapped: bool
) -> MappedTiles:
    return MappedTiles(rows, columns, depth, stages, warps, _GROUP, is_swapped)


# Where the average is a block's size, every other expert needs a second block: a larger one is
# faster there (gpt-oss with 256 tokens).
BY_MAPS: TileTable = (
    _SINGLE_ROWS,
    (15.75, (_mapped(16, 64, 128, 3, 4, True), _mapped(16, 64, 128, 5, 4, True))),
    (31.75, (_mapped(32, 64, 64, 5, 4, True), _mapped(32, 128, 64, 5, 4, True))),
    (64, (_mapped(64, 128, 64, 5, 8, True), _mapped(64, 128, 64, 4, 4, True))),
    (math.inf, (_mapped(128, 128, 64, 4, 8, False), _mapped(128, 256, 64, 3, 8, False))),
)


def table_for(experts: RoutedWeights, limits: DeviceLimits) -> TileTable:
    """The fastest that these experts can have on a device of these limits."""
    _, hidden_size, width = experts.down.shape
    return table_of(hidden_size, width, limits)


def table_of(hidden_size: int, width: int, limits: DeviceLimits) -> TileTable:
    """The same of experts of these sizes."""
    is_mapped = limits.has_copy_engine and has_maps(hidden_size, width)
    return BY_MAPS if is_mapped else BY_POINTERS


def tiles_for(table: TileTable, num_pairs: int, num_experts: int, shared_bytes: int) -> Tiles:
    """For num_pairs rows over num_experts experts. shared_bytes: that a program may use."""
    rows = num_pairs / num_experts
    activate, project = next(tiles for most, tiles in table if rows <= most)
    # Gate and up are two tiles of weights.
    return _within(activate, 2, shared_bytes), _within(project, 1, shared_bytes)


def _within(tiles: ExpertTiles, num_weights: int, shared_bytes: int) -> ExpertTiles:
    """With as many stages as fit."""
    stage = (tiles.block_rows + num_weights * tiles.columns) * tiles.depth * _ITEM_BYTES
    stages = max(_FEWEST_STAGES, min(tiles.num_stages, shared_bytes // stage))
    return replace(tiles, num_stages=stages)
