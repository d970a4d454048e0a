"""What the kernels of int4_mma.py and int4_persistent.py have in common: turns that a warp holds in
registers times x, and what becomes of the sums. Knows no kernel.
"""

import triton
import triton.language as tl

from workers.layers.quantised.gemv import store_rows
from workers.layers.quantised.int4_fragments import row_sums, turn_sums, turn_zeros, whole
from workers.layers.quantised.int4_turns import chunk_at, load_tiles


def _run_multiply_turn(
    held: tl.tensor,
    x_at: tl.tensor,
    totals: tl.tensor,
    dtype: tl.constexpr,
    shape: tl.constexpr,
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """totals and a turn's products of each tile's two rows, float32 (threads,)."""
    chunks: tl.constexpr = shape.turn // 128
    tiles: tl.constexpr = shape.tiles
    sums = tl.tuple(())
    for _ in tl.static_range(tiles):
        none = tl.zeros((32 * shape.warps, 4), dtype=tl.float32)
        sums = sums + ((none, none),)
    for chunk in tl.static_range(chunks):
        x = tl.tuple(())
        for quarter in tl.static_range(4):
            x = x + (tl.load(chunk_at(x_at + (quarter * (shape.turn // 8) + chunk * 16))),)
        added = tl.tuple(())
        for tile in tl.static_range(tiles):
            own = held[tile]
            zeros = turn_zeros(own[2 * chunks], own[2 * chunks + 1], dtype, IS_PACKED)
            words = own[2 * chunk], own[2 * chunk + 1]
            added = added + (turn_sums(words, x, zeros, sums[tile], dtype, IS_PACKED),)
        sums = added
    out = tl.tuple(())
    for tile in tl.static_range(tiles):
        scales = held[tile][2 * chunks + 2 :]
        low, high = row_sums(sums[tile][0]), row_sums(sums[tile][1])
        for row in tl.static_range(2):
            total = totals[2 * tile + row] + low[row] * scales[row].to(tl.float32)
            out = out + (total + high[row] * scales[2 + row].to(tl.float32),)
    return out


multiply_turn = triton.jit(_run_multiply_turn)


def _run_multiply_held(  # noqa: PLR0913
    held: tl.tensor,
    at: tl.tensor,
    x_at: tl.tensor,
    totals: tl.tensor,
    dtype: tl.constexpr,
    shape: tl.constexpr,
    COUNT: tl.constexpr,  # noqa: N803
    NEXT: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """The COUNT turns that are held, from at on -> totals, and the NEXT turns behind them."""
    following = tl.tuple(())
    for step in tl.static_range(COUNT):
        place = x_at + step * (shape.turn // 2)
        totals = multiply_turn(held[step], place, totals, dtype, shape, IS_PACKED)
        if step < NEXT:
            following = following + (load_tiles(at, COUNT + step, shape),)
    return totals, following


multiply_held = triton.jit(_run_multiply_held)


def _run_store_tile(
    out: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    tile: tl.tensor,
    dtype: tl.constexpr,
    shape: tl.constexpr,
    IS_GELU: tl.constexpr,  # noqa: N803
) -> None:
    """first, second: float32 (threads,), what each warp's lanes have of their rows; the four lanes
    of a row have the same."""
    both = tl.reshape(tl.join(first, second), (shape.warps, 8, 4, 2))
    total = tl.reshape(tl.sum(tl.sum(both, axis=2), axis=0), (16,)) * (whole(dtype) / 4)
    features = shape.rows if shape.further == 1 else shape.further
    store_rows(out, total, tile, tl.program_id(1), features, 16, shape.further > 1, IS_GELU)


store_tile = triton.jit(_run_store_tile)
