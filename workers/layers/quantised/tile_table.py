"""Which way a product with kept weights takes, by its form and number of rows.

Tiles of the kernels for few rows, up to the most rows that each is for; beyond the last a form has
its way of many rows. Of an H200, 2026-11-28: benchmarks/h200/quantised_products.py --sweep at 1,
16, 64 and 256 rows of rows' FP8 and of four bits; FP8 in blocks has the tiles of rows.
"""

from workers.layers.quantised.skinny_shape import SkinnyTiles

TileTable = tuple[tuple[int, SkinnyTiles], ...]

# Blocks' turns are 128 columns, those of four bits what they are packed for.
FP8_ROWS: TileTable = (
    (16, SkinnyTiles(128, 16, 128, min_programs=132, num_stages=4, num_warps=8)),
)
FP8_BLOCKS: TileTable = FP8_ROWS
INT4: TileTable = (
    (16, SkinnyTiles(128, 16, 128, min_programs=132, num_stages=3, num_warps=4)),
    (64, SkinnyTiles(64, 64, 128, min_programs=132, num_stages=3, num_warps=4)),
    (192, SkinnyTiles(64, 64, 128, min_programs=132, num_stages=2, num_warps=4)),
)


def tiles_for(table: TileTable, num_rows: int) -> SkinnyTiles | None:
    """None: the way of many rows."""
    return next((tiles for most, tiles in table if num_rows <= most), None)
