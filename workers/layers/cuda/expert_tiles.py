"""Tiles of the experts' products by how many rows an expert gets on average.

Measured on an H200 with DeepSeek-V2-Lite's sizes: benchmarks/h200/experts.py.
"""

from dataclasses import replace

from workers.layers.cuda.expert_gemm import ExpertTiles

_ITEM_BYTES = 2
_FEWEST_STAGES = 2

Tiles = tuple[ExpertTiles, ExpertTiles]
"""Of activate_experts and of project_experts; both with the same block_rows."""

BY_ROWS: tuple[tuple[int, Tiles], ...] = (
    (1, (ExpertTiles(16, 64, 128, 3, 4), ExpertTiles(16, 64, 128, 5, 4))),
    (16, (ExpertTiles(16, 32, 256, 3, 4), ExpertTiles(16, 64, 128, 5, 4))),
    (32, (ExpertTiles(32, 64, 64, 4, 4), ExpertTiles(32, 128, 64, 4, 4))),
    (64, (ExpertTiles(64, 64, 64, 4, 4), ExpertTiles(64, 128, 64, 4, 4))),
    (1 << 30, (ExpertTiles(128, 128, 64, 4, 8), ExpertTiles(128, 256, 64, 4, 8))),
)
"""By the most rows that each is for."""


def tiles_for(num_pairs: int, num_experts: int, shared_bytes: int) -> Tiles:
    """For num_pairs rows over num_experts experts. shared_bytes: that a program may use."""
    rows = -(-num_pairs // num_experts)
    activate, project = next(tiles for most, tiles in BY_ROWS if rows <= most)
    # Gate and up are two tiles of weights.
    return _within(activate, 2, shared_bytes), _within(project, 1, shared_bytes)


def _within(tiles: ExpertTiles, num_weights: int, shared_bytes: int) -> ExpertTiles:
    """With as many stages as fit."""
    stage = (tiles.block_rows + num_weights * tiles.columns) * tiles.depth * _ITEM_BYTES
    stages = max(_FEWEST_STAGES, min(tiles.num_stages, shared_bytes // stage))
    return replace(tiles, num_stages=stages)
