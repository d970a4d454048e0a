"""Which way a product with kept weights takes, by its form and number of rows.

Tiles of the kernels for few rows, up to the most rows that each is for; beyond the last a form has
its way of many rows. Not measured yet: benchmarks/h200/quantised_products.py --sweep prints what is
fastest.
"""

from workers.layers.quantised.skinny_shape import SkinnyTiles

TileTable = tuple[tuple[int, SkinnyTiles], ...]

# Blocks' turns are 128 columns, those of four bits what they are packed for.
FP8_ROWS: TileTable = ((16, SkinnyTiles(64, 16, 128, min_programs=384, num_stages=4, num_warps=4)),)
FP8_BLOCKS: TileTable = (
    (16, SkinnyTiles(64, 16, 128, min_programs=384, num_stages=4, num_warps=4)),
)
INT4: TileTable = (
    (16, SkinnyTiles(64, 16, 128, min_programs=384, num_stages=4, num_warps=4)),
    (32, SkinnyTiles(128, 32, 128, min_programs=256, num_stages=3, num_warps=8)),
    (64, SkinnyTiles(128, 64, 128, min_programs=256, num_stages=2, num_warps=8)),
    (512, SkinnyTiles(128, 128, 128, min_programs=132, num_stages=2, num_warps=8)),
)


def tiles_for(table: TileTable, num_rows: int) -> SkinnyTiles | None:
    """None: the way of many rows."""
    return next((tiles for most, tiles in table if num_rows <= most), None)
