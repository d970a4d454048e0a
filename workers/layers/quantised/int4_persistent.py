"""The kernel of int4_mma.py by programs that stay: they take blocks of rows by turns of the grid.

What a warp has multiplied makes room for as many turns of what it multiplies next, its next block's
as well: memory is asked for all the time, where programs of one block each end and begin. Knows no
layer.
"""

import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent
from workers.layers.quantised.int4_parts import multiply_held, store_tile
from workers.layers.quantised.int4_turns import begin, load_tiles


def _run_tiles_at(
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    block: tl.tensor,
    turn: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """As begin, of each tile of a block of rows."""
    tiles: tl.constexpr = shape.tiles
    at = tl.tuple(())
    for tile in tl.static_range(tiles):
        at = at + (begin(words, scales, zeros, block * tiles + tile, turn, shape),)
    return at


tiles_at = triton.jit(_run_tiles_at)


def _run_store_block(
    out: tl.tensor,
    totals: tl.tensor,
    block: tl.tensor,
    dtype: tl.constexpr,
    shape: tl.constexpr,
    IS_GELU: tl.constexpr,  # noqa: N803
) -> None:
    tiles: tl.constexpr = shape.tiles
    for tile in tl.static_range(tiles):
        first, second = totals[2 * tile], totals[2 * tile + 1]
        store_tile(out, first, second, block * tiles + tile, dtype, shape, IS_GELU)


store_block = triton.jit(_run_store_block)


def _int4_persistent(  # noqa: PLR0913
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out: tl.tensor,
    shape: tl.constexpr,
    IS_GELU: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (which of those that share blocks out, split)."""
    tiles: tl.constexpr = shape.tiles
    depth: tl.constexpr = shape.depth
    batches: tl.constexpr = shape.steps // shape.depth
    threads = tl.arange(0, 32 * shape.warps)
    turn = (tl.program_id(1) * shape.warps + threads // 32) * shape.steps
    num_blocks = tl.cdiv(shape.rows, 16 * shape.tiles)
    block = tl.program_id(0)
    at = tiles_at(words, scales, zeros, block, turn, shape)
    held = tl.tuple(())
    for step in tl.static_range(depth):
        held = held + (load_tiles(at, step, shape),)
    begin_dependent(IS_DEPENDENT)
    dtype: tl.constexpr = x.dtype.element_ty
    pairs = x.to(tl.pointer_type(tl.int32), bitcast=True)
    x_at = pairs + turn * (shape.turn // 2) + threads % 4 * 4
    nothing = tl.zeros((32 * shape.warps,), dtype=tl.float32)
    for block in tl.range(tl.program_id(0), num_blocks - tl.num_programs(0), tl.num_programs(0)):
        totals = tl.tuple(())
        for _ in tl.static_range(2 * tiles):
            totals = totals + (nothing,)
        for batch in tl.static_range(batches):
            # load_tiles counts from depth turns before what comes next.
            if batch < batches - 1:
                at = tiles_at(words, scales, zeros, block, turn + batch * depth, shape)
            else:
                other = block + tl.num_programs(0)
                at = tiles_at(words, scales, zeros, other, turn - depth, shape)
            place = x_at + batch * depth * (shape.turn // 2)
            totals, held = multiply_held(
                held, at, place, totals, dtype, shape, depth, depth, IS_PACKED
            )
        store_block(out, totals, block, dtype, shape, IS_GELU)
    last = (num_blocks - 1 - tl.program_id(0)) // tl.num_programs(0)
    block = tl.program_id(0) + last * tl.num_programs(0)
    totals = tl.tuple(())
    for _ in tl.static_range(2 * tiles):
        totals = totals + (nothing,)
    for batch in tl.static_range(batches):
        at = tiles_at(words, scales, zeros, block, turn + batch * depth, shape)
        place = x_at + batch * depth * (shape.turn // 2)
        if batch < batches - 1:
            totals, held = multiply_held(
                held, at, place, totals, dtype, shape, depth, depth, IS_PACKED
            )
        else:
            totals, held = multiply_held(held, at, place, totals, dtype, shape, depth, 0, IS_PACKED)
    store_block(out, totals, block, dtype, shape, IS_GELU)


int4_persistent_kernel = triton.jit(_int4_persistent)
