"""Packed four-bit weights times one row of x on tensor cores, whose eight columns are all that row.

A warp has 16 rows of the weight, or twice as many, and a share of their columns: a lane's 16 bytes
of a row are operands of two products of each quarter (int4_fragments.py), so that nothing moves
between lanes but sums, once a program. Turns are held in registers, several at once: the first are
asked for before the predecessor ends, and what was multiplied makes room for the next. Knows no
layer.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch
from workers.layers.gate import Gate
from workers.layers.kept.int4 import ROWS_TOGETHER, Int4Groups
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.gemv import new_output
from workers.layers.quantised.int4_turn_sums import multiply_turn, store_tile, tile_sums
from workers.layers.quantised.int4_turns import (
    TILE_ROWS,
    MmaShape,
    advance,
    begin_block,
    load_tiles,
)
from workers.layers.quantised.skinny_shape import SkinnyShape

ALIGNMENT_BYTES = 16


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


def _run_hold_first(words: tl.tensor, headers: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Of program (block of rows, split): the turn, (threads,), that each warp begins with, where
    its tiles lie, and the turns that it holds at first."""
    depth: tl.constexpr = shape.depth
    threads = tl.arange(0, 32 * shape.warps)
    turn = (tl.program_id(1) * shape.warps + threads // 32) * shape.steps
    at = begin_block((words, headers), tl.program_id(0), turn, shape)
    held = tl.tuple(())
    for step in tl.static_range(depth):
        held = held + (load_tiles(at, step, shape),)
    return turn, at, held


hold_first = triton.jit(_run_hold_first)


def _run_multiply_row(
    begun: tl.tensor,
    x: tl.tensor,
    shape: tl.constexpr,
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """What each warp's lanes have of a row of x and both of a tile's rows, float32 (threads,), two
    a tile. begun: as hold_first leaves it."""
    tiles: tl.constexpr = shape.tiles
    depth: tl.constexpr = shape.depth
    last: tl.constexpr = shape.steps % shape.depth
    dtype: tl.constexpr = x.dtype.element_ty
    turn, at, held = begun
    totals = tl.tuple(())
    nothing = tl.zeros((32 * shape.warps,), dtype=tl.float32)
    for _ in tl.static_range(2 * tiles):
        totals = totals + (nothing,)
    pairs = x.to(tl.pointer_type(tl.int32), bitcast=True)
    x_at = pairs + turn * (shape.turn // 2) + tl.arange(0, 32 * shape.warps) % 4 * 4
    for _ in tl.range(shape.steps // shape.depth - 1):
        totals, held = multiply_held(held, at, x_at, totals, dtype, shape, depth, depth, IS_PACKED)
        x_at += shape.depth * (shape.turn // 2)
        moved = tl.tuple(())
        for tile in tl.static_range(tiles):
            moved = moved + (advance(at[tile], shape),)
        at = moved
    totals, held = multiply_held(held, at, x_at, totals, dtype, shape, depth, last, IS_PACKED)
    x_at += shape.depth * (shape.turn // 2)
    totals, held = multiply_held(held, at, x_at, totals, dtype, shape, last, 0, IS_PACKED)
    return totals


multiply_row = triton.jit(_run_multiply_row)


def _int4_mma(
    x: tl.tensor,
    words: tl.tensor,
    headers: tl.tensor,
    out: tl.tensor,
    shape: tl.constexpr,
    IS_GELU: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (block of rows, split)."""
    tiles: tl.constexpr = shape.tiles
    begun = hold_first(words, headers, shape)
    begin_dependent(IS_DEPENDENT)
    totals = multiply_row(begun, x, shape, IS_PACKED)
    for tile in tl.static_range(tiles):
        total = tile_sums(totals[2 * tile], totals[2 * tile + 1], x.dtype.element_ty, shape)
        store_tile(out, total, tl.program_id(0) * tiles + tile, shape, IS_GELU)


_int4_mma_kernel = triton.jit(_int4_mma)


def mma_shape(kept: Int4Groups, shape: SkinnyShape, is_gated: bool) -> MmaShape:
    """shape.num_stages: turns that a warp holds at most."""
    warps = shape.block_k // kept.turn
    steps = kept.in_features // (shape.num_splits * shape.block_k)
    num_batches = -(-steps // shape.num_stages)
    rows = kept.out_features
    return MmaShape(
        rows=rows,
        columns=kept.in_features,
        turn=kept.turn,
        header_words=kept.headers.shape[-1],
        steps=steps,
        depth=-(-steps // num_batches),
        warps=warps,
        tiles=shape.block_rows // TILE_ROWS,
        is_gated=is_gated,
        further=rows // 2 if is_gated else ROWS_TOGETHER,
        last_row=rows // 2 - 1 if is_gated else rows - 1,
        is_whole=rows % shape.block_rows == 0,
        chains=shape.chains,
    )


def check_alignment(x: torch.Tensor, kept: Int4Groups) -> None:
    """Raises ValueError for x and words that do not begin at a multiple of 16 bytes: Triton would
    give a thread fewer of a row's numbers."""
    if any(tensor.data_ptr() % ALIGNMENT_BYTES for tensor in (x, kept.words)):
        raise ValueError("x and words have to begin where 16 bytes are loaded at once")


def launch_options(x: torch.Tensor, shape: SkinnyShape, compiled_for: MmaShape) -> dict[str, Any]:
    """What the kernels for one row are launched with beside tensors."""
    is_dependent = dependent_launch(x)
    return {
        "shape": compiled_for,
        "IS_PACKED": x.is_cuda,
        "IS_DEPENDENT": is_dependent,
        "num_warps": compiled_for.warps,
        "maxnreg": shape.max_registers,
        "launch_pdl": is_dependent,
    }


def int4_mma(
    x: torch.Tensor,
    kept: Int4Groups,
    shape: SkinnyShape,
    new: NewTensor = torch.empty,
    gate: Gate | None = None,
) -> torch.Tensor:
    """x (1, in_features) of 16 bits, its columns as kept has them, contiguous -> (shape.num_splits,
    1, out_features); with a gate the activation, (1, 1, out_features / 2), of a weight that is gate
    over up. One split has x's dtype, several are float32: their sum is the product. shape.block_k:
    a turn for each warp. Raises ValueError as new_output and check_alignment do."""
    check_alignment(x, kept)
    out = new_output(x, kept.out_features, shape, gate, new)
    compiled_for = mma_shape(kept, shape, gate is not None)
    _int4_mma_kernel[(triton.cdiv(kept.out_features, shape.block_rows), shape.num_splits)](
        x,
        kept.words,
        kept.headers,
        out,
        IS_GELU=gate == "gelu_tanh",
        **launch_options(x, shape, compiled_for),
    )
    return out
