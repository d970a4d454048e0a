"""Which words, zeros and scales of packed four-bit weights a lane of a tensor core product has, and
loads of them into registers.

A warp has 16 rows of the weight a tile, and a lane two of them: neighbours, or a gate's and its up
projection's. Four lanes share a row: of each 128 columns a lane has 16 bytes. Multiplies nothing.
"""

from typing import NamedTuple

import triton
import triton.language as tl

TILE_ROWS = 16


class MmaShape(NamedTuple):
    """What the kernel is compiled for. rows, columns: of the weight. turn: columns that are packed
    together. halves: halves of turns that have a scale. steps: turns of a warp, depth of which it
    holds. tiles: of 16 rows, of each warp. further: rows from a lane's first row of a tile to its
    second. last_row: of those that are a lane's first. are_pairs: a lane's rows are neighbours, and
    all of them are there. chains: sums that 128 columns after 128 of a half turn are added to by
    turns. Fields alone, which Triton reads as it compiles."""

    rows: int
    columns: int
    turn: int
    halves: int
    steps: int
    depth: int
    warps: int
    tiles: int
    further: int
    last_row: int
    are_pairs: bool
    chains: int


def _run_begin(
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    tile: tl.tensor,
    turn: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Where a lane's words of each of its rows lie, its zeros and its scales; and turn, (threads,):
    the first that its warp has."""
    lanes = tl.arange(0, 32 * shape.warps) % 32
    first = tile * 16 + lanes // 4 * 2
    if shape.further > 1:
        first = first // 2
    second = first + shape.further
    if not shape.are_pairs:
        first = tl.minimum(first, shape.last_row)
        second = tl.minimum(second, shape.rows - 1)
    words_at = words + turn * (shape.turn // 8) + lanes % 4 * 4
    row_words = shape.columns // 8
    zeros_at = zeros + turn * shape.rows
    scales_at = scales + turn * (2 * shape.rows) if shape.halves == 1 else scales
    return (
        words_at + first.to(tl.int64) * row_words,
        words_at + second.to(tl.int64) * row_words,
        zeros_at + first,
        zeros_at + second,
        scales_at + first,
        scales_at + second,
        turn,
    )


begin = triton.jit(_run_begin)


def _run_begin_block(
    weight: tl.tensor, block: tl.tensor, turn: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """The same of each tile of a block of rows. weight: words, scales, zeros."""
    tiles: tl.constexpr = shape.tiles
    at = tl.tuple(())
    for tile in tl.static_range(tiles):
        row_tile = block * tiles + tile
        at = at + (begin(weight[0], weight[1], weight[2], row_tile, turn, shape),)
    return at


begin_block = triton.jit(_run_begin_block)


def _run_advance(at: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """The same depth turns further on."""
    words = shape.depth * (shape.turn // 8)
    zeros = shape.depth * shape.rows
    scales = 2 * shape.depth * shape.rows if shape.halves == 1 else 0
    return (
        at[0] + words,
        at[1] + words,
        at[2] + zeros,
        at[3] + zeros,
        at[4] + scales,
        at[5] + scales,
        at[6] + shape.depth,
    )


advance = triton.jit(_run_advance)


def _run_chunk(at: tl.tensor) -> tl.tensor:
    """int32 pointers (threads,) -> (threads, 4): four words from each."""
    # Pointers of one dimension keep one layout; of two they would get another in loops.
    return at[:, None] + tl.arange(0, 4)[None, :]


chunk_at = triton.jit(_run_chunk)


def _run_load_words(at: tl.tensor, is_there: tl.tensor) -> tl.tensor:
    """Four from each of at, which no other program reads. is_there: (threads,), or None where all
    are; of the others it is whatever there was."""
    if is_there is None:
        return tl.load(chunk_at(at), eviction_policy="evict_first")
    else:  # noqa: RET505 - Triton takes one of branches that all return
        return tl.load(chunk_at(at), mask=is_there[:, None], eviction_policy="evict_first")


load_words = triton.jit(_run_load_words)


def _run_row_pair(
    first: tl.tensor,
    second: tl.tensor,
    is_there: tl.tensor,
    ARE_PAIRS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """What lies at both, by one load if they are neighbours. is_there: as load_words has it."""
    if ARE_PAIRS:
        pairs = first[:, None] + tl.arange(0, 2)[None, :]
        if is_there is None:
            return tl.split(tl.load(pairs))
        else:  # noqa: RET505
            return tl.split(tl.load(pairs, mask=is_there[:, None]))
    else:
        return tl.load(first, mask=is_there), tl.load(second, mask=is_there)


row_pair = triton.jit(_run_row_pair)


def _run_load_turn(
    at: tl.tensor, step: tl.constexpr, is_there: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """Of the turn that is step further on: words of both rows, 128 columns after 128, then both
    rows' zeros, scales of its first half and of its second. is_there: as load_words has it."""
    chunks: tl.constexpr = shape.turn // 128
    held = tl.tuple(())
    for chunk in tl.static_range(chunks):
        place = step * (shape.turn // 8) + chunk * 16
        first = load_words(at[0] + place, is_there)
        second = load_words(at[1] + place, is_there)
        held = held + (first, second)
    zeros = step * shape.rows
    held = held + row_pair(at[2] + zeros, at[3] + zeros, is_there, shape.are_pairs)
    for half in tl.static_range(2):
        if shape.halves == 1:
            scales = (2 * step + half) * shape.rows
        else:
            scales = (2 * (at[6] + step) + half) // shape.halves * shape.rows
        held = held + row_pair(at[4] + scales, at[5] + scales, is_there, shape.are_pairs)
    return held


load_turn = triton.jit(_run_load_turn)


def _run_load_tiles(
    at: tl.tensor, step: tl.constexpr, is_there: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    tiles: tl.constexpr = shape.tiles
    held = tl.tuple(())
    for tile in tl.static_range(tiles):
        held = held + (load_turn(at[tile], step, is_there, shape),)
    return held


load_tiles = triton.jit(_run_load_tiles)
