"""Which way a product with kept weights takes, by its form, number of rows and size.

Tiles of the kernels for few rows; where no rule holds a form has its way of many rows. Of an H200,
2026-11-28: benchmarks/h200/quantised_products.py --sweep at 1, 16 and 64 rows of FP8, whose two
forms have the same fastest tiles, and at 1, 64 and 256 of four bits. FP8 has tiles that round x
(RoundedSkinnyTiles): a kernel that made 16 bits of the weights was slower at all of these.
GemvTiles: benchmarks/h200/kept_chain.py, that day. MmaTiles: kept_engine.py, 2026-11-29.
"""

from dataclasses import dataclass

from workers.layers.quantised.skinny_shape import (
    GemvTiles,
    MappedSkinnyTiles,
    MmaTiles,
    RoundedSkinnyTiles,
    SkinnyTiles,
)


@dataclass(frozen=True, slots=True)
class TileRule:
    """Of products with up to max_rows rows of x and at least min_out_features output features.
    tiles: their class says by which kernel; None is the way of many rows."""

    max_rows: int
    tiles: SkinnyTiles | None
    min_out_features: int = 0


TileTable = tuple[TileRule, ...]
"""The first rule that holds is taken: rules of more output features stand before those of fewer."""

_WIDE = 16384
"""Output features that fill a GPU with programs, none of which shares input features out."""
_BEYOND_ONE_WAVE = 4225
"""Output features that are more blocks of 16 than two for each of an H200's multiprocessors."""

# Blocks' turns are 128 columns, those of four bits what they are packed for.
FP8_ROWS: TileTable = (
    TileRule(1, GemvTiles(8, 1, 1024, min_programs=512, num_stages=3, num_warps=4)),
    TileRule(16, RoundedSkinnyTiles(128, 16, 128, min_programs=132, num_stages=4, num_warps=8)),
    TileRule(64, None, _WIDE),
    TileRule(64, MappedSkinnyTiles(128, 64, 128, min_programs=132, num_stages=3, num_warps=8)),
)
FP8_BLOCKS: TileTable = FP8_ROWS
FP8_GATED: TileTable = (
    TileRule(1, GemvTiles(8, 1, 512, min_programs=1, num_stages=4, num_warps=2)),
)
INT4: TileTable = (
    TileRule(1, MmaTiles(16, 1, 1024, 1, 4, num_warps=4, max_registers=160), _BEYOND_ONE_WAVE),
    TileRule(1, MmaTiles(16, 1, 2048, 1, 3, num_warps=8, max_registers=128, chains=2)),
    TileRule(16, SkinnyTiles(128, 16, 128, min_programs=132, num_stages=3, num_warps=4)),
    TileRule(64, SkinnyTiles(64, 64, 128, min_programs=132, num_stages=3, num_warps=4)),
    TileRule(192, SkinnyTiles(64, 64, 128, min_programs=132, num_stages=2, num_warps=4)),
)
INT4_GATED: TileTable = (
    TileRule(1, MmaTiles(16, 1, 1024, 1, num_stages=2, num_warps=4, max_registers=96)),
)
"""Of weights that are a gate's rows over an up projection's, by the rows of both: where a rule
holds one kernel makes the activation. They have GemvTiles alone."""


def tiles_for(table: TileTable, num_rows: int, out_features: int) -> SkinnyTiles | None:
    """None: the way of many rows."""
    for rule in table:
        if num_rows <= rule.max_rows and out_features >= rule.min_out_features:
            return rule.tiles
    return None
