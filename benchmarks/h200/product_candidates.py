"""Tiles that quantised_products --sweep tries, by the number of rows. Knows no device."""

from workers.layers.kept.fp8 import BLOCK
from workers.layers.quantised.skinny_shape import (
    GemvTiles,
    MappedSkinnyTiles,
    MmaTiles,
    RoundedSkinnyTiles,
    SkinnyTiles,
)


def worth_trying(num_rows: int, turn: int) -> list[SkinnyTiles]:
    """turn: of the form, of which a turn is at most twice as much."""
    tokens = tile_tokens(num_rows)
    shapes = [(64, 4, 4), (64, 3, 4), (64, 2, 4), (128, 4, 8), (128, 3, 8), (128, 2, 8)]
    if tokens <= 16:
        shapes += [(64, 6, 4), (128, 3, 4), (128, 4, 4), (256, 3, 8)]
    tried = [
        SkinnyTiles(rows, tokens, turn, programs, stages, warps)
        for rows, stages, warps in shapes
        for programs in (132, 264, 528)
    ]
    if tokens == 128:
        tried += [SkinnyTiles(rows, 64, turn, 132, 2, rows // 16) for rows in (64, 128)]
    return tried


def tile_tokens(num_rows: int) -> int:
    return min(128, max(16, 1 << (num_rows - 1).bit_length()))


def rounded_worth_trying(num_rows: int, by_block: bool) -> list[SkinnyTiles]:
    """by_block: with scales of blocks, one of which a turn and a program's rows do not exceed."""
    tokens = min(64, tile_tokens(num_rows))
    if tokens <= 16:
        both = [(64, tokens, 128, 528, 4, 4), (128, tokens, 128, 132, 4, 8)]
        both += [(128, tokens, 128, 264, 4, 4), (64, tokens, 256, 528, 3, 4)]
        others = [(64, tokens, 128, 264, 4, 4), (64, tokens, 128, 528, 6, 4)]
        others += [(128, tokens, 128, 264, 4, 8), (256, tokens, 128, 132, 3, 8)]
    else:
        both = [(64, tokens, 128, 264, 4, 4), (128, tokens, 128, 132, 3, 8)]
        both += [(256, tokens, 128, 132, 3, 8)]
        others = [(64, tokens, 128, 264, 3, 4), (128, tokens, 128, 132, 4, 8)]
        others += [(128, tokens, 128, 264, 3, 8), (128, tokens // 2, 128, 264, 4, 8)]
    tried: list[SkinnyTiles] = [RoundedSkinnyTiles(*size) for size in both + others]
    tried += [MappedSkinnyTiles(*size) for size in both]
    return [
        one
        for one in tried
        if not by_block or (one.block_k == BLOCK and BLOCK % one.block_rows == 0)
    ]


_ROUNDED_ONE_ROW = ((64, 128, 528, 4, 4), (128, 128, 132, 4, 8), (128, 128, 264, 4, 4))
_FP8_GEMVS = (
    (8, 1024, 512, 1, 4),
    (8, 1024, 512, 3, 4),
    (4, 1024, 1024, 1, 4),
    (4, 2048, 1024, 1, 4),
    (16, 512, 512, 3, 4),
    (16, 512, 512, 1, 4),
    (8, 512, 1024, 1, 2),
    (8, 512, 1024, 4, 2),
    (16, 1024, 256, 3, 8),
)
_INT4_SKINNY_ONE_ROW = ((16, 1056, 4, 1),)
"""(rows, least programs, stages, warps)."""
_INT4_MMAS = (
    (16, 2048, 1, 2, 80, 1),
    (16, 2048, 1, 2, 80, 2),
    (16, 2048, 1, 2, 128, 1),
    (16, 2048, 1, 2, 128, 2),
    (16, 2048, 1, 3, 128, 2),
    (16, 2048, 1, 4, 128, 2),
    (16, 2048, 1, 7, None, 2),
    (16, 1024, 1, 4, 128, 1),
    (16, 1024, 1, 4, 160, 1),
    (16, 1024, 1, 4, None, 1),
    (16, 1024, 1, 4, None, 2),
    (16, 1024, 1, 2, 96, 1),
    (32, 1024, 1, 2, None, 1),
    (16, 512, 1024, 4, 144, 1),
)
"""(rows, columns of the program's warps, least programs, turns of a warp, registers, chains)."""
_WARP_COLUMNS = 256


def one_row_worth_trying(name: str) -> list[SkinnyTiles]:
    """For one row of x of a format of quantised_products.FORMATS."""
    if name == "int4":
        skinny = [SkinnyTiles(r, 16, 128, p, s, w) for r, p, s, w in _INT4_SKINNY_ONE_ROW]
        mmas = [
            MmaTiles(r, 1, k, p, s, k // _WARP_COLUMNS, m, c) for r, k, p, s, m, c in _INT4_MMAS
        ]
        return [*skinny, *mmas]
    rounded = [RoundedSkinnyTiles(r, 16, k, p, s, w) for r, k, p, s, w in _ROUNDED_ONE_ROW]
    return [*rounded, *(GemvTiles(r, 1, k, p, s, w) for r, k, p, s, w in _FP8_GEMVS)]
