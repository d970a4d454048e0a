"""Which words and headers of packed four-bit weights a lane of a tensor core product has, and loads
of them into registers.

A warp has 16 rows of the weight a tile, and a lane two of them: eight apart, or a gate's and its up
projection's. Four lanes share a row: of each 128 columns a lane has 16 bytes, so that a warp loads
512 that lie together, and a turn's headers are loaded once a row. Multiplies nothing.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from workers.layers.kept.int4 import CHUNK_WORDS, ROWS_TOGETHER, VALUES_PER_WORD
from workers.layers.quantised.int4_rows import (
    headers_stride,
    load_scale_words,
    load_zeros,
    row_headers,
    row_words,
)

TILE_ROWS = 16
_TOGETHER = tl.constexpr(ROWS_TOGETHER)
_CHUNK_COLUMNS = tl.constexpr(CHUNK_WORDS * VALUES_PER_WORD)


class MmaShape(NamedTuple):
    """What the kernel is compiled for. rows, columns: of the weight. turn: columns that are packed
    together. header_words: of a row's turn. steps: turns of a warp, depth of which it holds. tiles:
    of 16 rows, of each warp. is_gated: a lane's rows are a gate's and its up projection's. further:
    rows from a lane's first row of a tile to its second. last_row: of those that are a lane's
    first. is_whole: all rows of all tiles are there. chains: sums that 128 columns after 128 of a
    half turn are added to by turns. Fields alone, which Triton reads as it compiles."""

    rows: int
    columns: int
    turn: int
    header_words: int
    steps: int
    depth: int
    warps: int
    tiles: int
    is_gated: bool
    further: int
    last_row: int
    is_whole: bool
    chains: int


def _run_begin(
    words: tl.tensor, headers: tl.tensor, tile: tl.tensor, turn: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """Where the words and headers of both of a lane's rows lie, of turn, (threads,), the first that
    its warp has."""
    lanes = tl.arange(0, 32 * shape.warps) % 32
    tile_rows: tl.constexpr = _TOGETHER if shape.is_gated else 2 * _TOGETHER
    first = tile * tile_rows + lanes // 4
    second = first + shape.further
    if not shape.is_whole:
        first = tl.minimum(first, shape.last_row)
        second = tl.minimum(second, shape.rows - 1)
    first, second = first.to(tl.int64), second.to(tl.int64)
    words_at = words + turn * shape.turn + lanes % 4 * 4
    headers_at = headers + turn * headers_stride(shape.header_words)
    turns: tl.constexpr = shape.columns // shape.turn
    return (
        row_words(words_at, first, shape.columns),
        row_words(words_at, second, shape.columns),
        row_headers(headers_at, first, turns, shape.header_words),
        row_headers(headers_at, second, turns, shape.header_words),
    )


begin = triton.jit(_run_begin)


def _run_begin_block(
    weight: tl.tensor, block: tl.tensor, turn: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """The same of each tile of a block of rows. weight: words, headers."""
    tiles: tl.constexpr = shape.tiles
    at = tl.tuple(())
    for tile in tl.static_range(tiles):
        row_tile = block * tiles + tile
        at = at + (begin(weight[0], weight[1], row_tile, turn, shape),)
    return at


begin_block = triton.jit(_run_begin_block)


def _run_advance(at: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """The same depth turns further on."""
    words = shape.depth * shape.turn
    headers = shape.depth * headers_stride(shape.header_words)
    return at[0] + words, at[1] + words, at[2] + headers, at[3] + headers


advance = triton.jit(_run_advance)


def _run_chunk(at: tl.tensor) -> tl.tensor:
    """int32 pointers (threads,) -> (threads, 4): four words from each."""
    # Pointers of one dimension keep one layout; of two they would get another in loops.
    return at[:, None] + tl.arange(0, 4)[None, :]


chunk_at = triton.jit(_run_chunk)


def _run_load_words(at: tl.tensor) -> tl.tensor:
    """Four from each of at, which no other program reads."""
    return tl.load(chunk_at(at), eviction_policy="evict_first")


load_words = triton.jit(_run_load_words)


def _run_load_header(at: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """A turn's zeros, int32 (threads,), and the words that its scales are in."""
    # A word a load: pairs of registers, which are scarce, would be moved as soon as they come, and
    # what is loaded behind them would wait for that.
    zeros = load_zeros(at, None, shape.header_words)
    return zeros, load_scale_words(at, None, shape.header_words)


load_header = triton.jit(_run_load_header)


def _run_load_turn(at: tl.tensor, step: tl.constexpr, shape: tl.constexpr) -> tl.tensor:
    """Of the turn that is step further on: words of both rows, 128 columns after 128, then both
    rows' headers."""
    chunks: tl.constexpr = shape.turn // _CHUNK_COLUMNS
    held = tl.tuple(())
    for chunk in tl.static_range(chunks):
        # Words of eight rows are as many as columns.
        place = step * shape.turn + chunk * _CHUNK_COLUMNS
        first = load_words(at[0] + place)
        second = load_words(at[1] + place)
        held = held + (first, second)
    headers = step * headers_stride(shape.header_words)
    for row in tl.static_range(2):
        held = held + (load_header(at[2 + row] + headers, shape),)
    return held


load_turn = triton.jit(_run_load_turn)


def _run_load_tiles(at: tl.tensor, step: tl.constexpr, shape: tl.constexpr) -> tl.tensor:
    tiles: tl.constexpr = shape.tiles
    held = tl.tuple(())
    for tile in tl.static_range(tiles):
        held = held + (load_turn(at[tile], step, shape),)
    return held


load_tiles = triton.jit(_run_load_tiles)
