"""What the streaming kernel for one row of x and four-bit weights is compiled for. Knows no Triton,
no tensor and no device."""

from typing import NamedTuple


class StreamShape(NamedTuple):
    """rows, columns: of the weight. turn: columns that are packed together. halves: halves of turns
    that have a scale. warps: of a program, each with a turn of a step. steps: of a block. tiles: of
    16 rows, of a block. tile_step: output features of a tile. further: rows from a lane's first row
    of a tile to its second. limit: output features. blocks: of all programs. stages: steps that a
    program has room for. early: steps that it has still to ask for when the next kernel may begin.
    Fields alone, which Triton reads as it compiles."""

    rows: int
    columns: int
    turn: int
    halves: int
    warps: int
    steps: int
    tiles: int
    tile_step: int
    further: int
    limit: int
    blocks: int
    stages: int
    early: int
