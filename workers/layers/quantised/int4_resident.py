"""Packed four-bit weights times one row of x by programs that stay on their multiprocessor.

A warp multiplies as in int4_mma.py, but a program has blocks of rows one after the other, and what
was multiplied makes room for the same turns of a block that comes later: copies of weights do not
stop while products are computed, nor between blocks. Warps meet for a block's sums alone. Knows no
layer.
"""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent
from workers.layers.gate import Gate
from workers.layers.kept.int4 import Int4Groups
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.gemv import new_output
from workers.layers.quantised.int4_mma import check_alignment, launch_options, mma_shape
from workers.layers.quantised.int4_turn_sums import multiply_turn, store_tile
from workers.layers.quantised.int4_turns import MmaShape, begin_block, load_tiles
from workers.layers.quantised.skinny_shape import ResidentShape


def _run_is_before(block: tl.tensor, last: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """For each thread, which have one answer."""
    return tl.full((32 * shape.warps,), block, dtype=tl.int32) < last


is_before = triton.jit(_run_is_before)


def _run_hold_block(
    weight: tl.tensor, block: tl.tensor, last: tl.tensor, turn: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """All turns of the block that a warp has; of last and beyond, whatever registers held."""
    at = begin_block(weight, block, turn, shape)
    is_there = is_before(block, last, shape)
    steps: tl.constexpr = shape.steps
    held = tl.tuple(())
    for step in tl.static_range(steps):
        held = held + (load_tiles(at, step, is_there, shape),)
    return held


hold_block = triton.jit(_run_hold_block)


def _run_multiply_block(  # noqa: PLR0913
    held: tl.tensor,
    weight: tl.tensor,
    later: tl.tensor,
    last: tl.tensor,
    turn: tl.tensor,
    x_at: tl.tensor,
    dtype: tl.constexpr,
    shape: tl.constexpr,
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """The turns that are held -> their sums, float32 (threads,) of each tile's two rows, and the
    turns of block later, as hold_block has them."""
    at = begin_block(weight, later, turn, shape)
    is_there = is_before(later, last, shape)
    totals, brought = tl.tuple(()), tl.tuple(())
    nothing = tl.zeros((32 * shape.warps,), dtype=tl.float32)
    steps: tl.constexpr = shape.steps
    tiles: tl.constexpr = shape.tiles
    for _ in tl.static_range(2 * tiles):
        totals = totals + (nothing,)
    for step in tl.static_range(steps):
        place = x_at + step * (shape.turn // 2)
        totals = multiply_turn(held[step], place, totals, dtype, shape, IS_PACKED)
        brought = brought + (load_tiles(at, step, is_there, shape),)
    return totals, brought


multiply_block = triton.jit(_run_multiply_block)


def _int4_resident(  # noqa: PLR0913
    x: tl.tensor,
    words: tl.tensor,
    headers: tl.tensor,
    out: tl.tensor,
    num_blocks: tl.tensor,
    shape: tl.constexpr,
    AHEAD: tl.constexpr,  # noqa: N803
    IS_GELU: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Programs have blocks, as many each but for one. AHEAD: blocks whose turns are held."""
    tiles: tl.constexpr = shape.tiles
    weight = (words, headers)
    threads = tl.arange(0, 32 * shape.warps)
    turn = threads // 32 * shape.steps
    first = tl.program_id(0) * num_blocks // tl.num_programs(0)
    last = (tl.program_id(0) + 1) * num_blocks // tl.num_programs(0)
    held = tl.tuple(())
    for index in tl.static_range(AHEAD):
        held = held + (hold_block(weight, first + index, last, turn, shape),)
    begin_dependent(IS_DEPENDENT)
    dtype: tl.constexpr = x.dtype.element_ty
    pairs = x.to(tl.pointer_type(tl.int32), bitcast=True)
    x_at = pairs + turn * (shape.turn // 2) + threads % 4 * 4
    for start in tl.range(first, last, AHEAD):
        following = tl.tuple(())
        for index in tl.static_range(AHEAD):
            block = start + index
            totals, brought = multiply_block(
                held[index], weight, block + AHEAD, last, turn, x_at, dtype, shape, IS_PACKED
            )
            following = following + (brought,)
            # Rows behind the weight's last are not stored.
            place = tl.where(block < last, block, num_blocks) * tiles
            for tile in tl.static_range(tiles):
                first_rows, second_rows = totals[2 * tile], totals[2 * tile + 1]
                store_tile(out, first_rows, second_rows, place + tile, dtype, shape, IS_GELU)
        held = following


_int4_resident_kernel = triton.jit(_int4_resident, do_not_specialize=("num_blocks",))


def blocks_ahead(shape: ResidentShape, compiled_for: MmaShape) -> int:
    """Blocks whose turns a warp holds at once."""
    return max(1, shape.num_stages // compiled_for.steps)


def int4_resident(
    x: torch.Tensor,
    kept: Int4Groups,
    shape: ResidentShape,
    new: NewTensor = torch.empty,
    gate: Gate | None = None,
) -> torch.Tensor:
    """As int4_mma. Raises ValueError as that does, and for splits."""
    if shape.num_splits != 1:
        raise ValueError(f"{shape.num_splits} splits, where programs that stay share none out")
    check_alignment(x, kept)
    out = new_output(x, kept.out_features, shape, gate, new)
    compiled_for = mma_shape(kept, shape, gate is not None)
    _int4_resident_kernel[(shape.programs,)](
        x,
        kept.words,
        kept.headers,
        out,
        triton.cdiv(kept.out_features, shape.block_rows),
        AHEAD=blocks_ahead(shape, compiled_for),
        **launch_options(x, shape, compiled_for, gate),
    )
    return out
