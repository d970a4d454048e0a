"""Two products with packed four-bit weights and the RMSNorm between them, of a row, by two kernels.

The first product joins the residual stream where its rows are: what it leaves is the stream times
the norm's weight, and the sum of squares of each of its tiles. The second one multiplies that, and
what comes out by one over the root mean square, which is one number of a row. So nothing waits for
a launch that reads all of the row for that number alone. The row is rounded before it is divided,
not behind it: in bfloat16, whose relative rounding is the same at any size. Products are those of
int4_mma.py. Knows no layer.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, next_power_of_2
from workers.layers.gate import Gate
from workers.layers.kept.int4 import Int4Groups
from workers.layers.quantised.gemv import new_output
from workers.layers.quantised.int4_mma import (
    check_alignment,
    hold_first,
    launch_options,
    mma_shape,
    multiply_row,
)
from workers.layers.quantised.int4_turn_sums import store_tile, tile_sums
from workers.layers.quantised.int4_turns import TILE_ROWS
from workers.layers.quantised.skinny_shape import SkinnyShape

_TILE_ROWS = tl.constexpr(TILE_ROWS)


@dataclass(frozen=True, slots=True)
class UndividedRow:
    """A norm's result but for the division. values: bfloat16 (1, hidden_size), the stream times the
    norm's weight. squares: float32 (tiles,), whose sum is the stream's of squares."""

    values: torch.Tensor
    squares: torch.Tensor


def _into_stream(  # noqa: PLR0913
    x: tl.tensor,
    words: tl.tensor,
    headers: tl.tensor,
    residual: tl.tensor,
    norm_weight: tl.tensor,
    values: tl.tensor,
    squares: tl.tensor,
    shape: tl.constexpr,
    IS_PACKED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (block of rows,): the stream's of these rows is this program's alone."""
    tiles: tl.constexpr = shape.tiles
    begun = hold_first(words, headers, shape)
    first = tl.program_id(0) * tiles
    rows = first * _TILE_ROWS + tl.arange(0, _TILE_ROWS)
    weights, streams = tl.tuple(()), tl.tuple(())
    for tile in tl.static_range(tiles):
        weights = weights + (tl.load(norm_weight + rows + tile * _TILE_ROWS),)
    begin_dependent(IS_DEPENDENT)
    for tile in tl.static_range(tiles):
        streams = streams + (tl.load(residual + rows + tile * _TILE_ROWS),)
    totals = multiply_row(begun, x, shape, IS_PACKED)
    for tile in tl.static_range(tiles):
        here = rows + tile * _TILE_ROWS
        total = tile_sums(totals[2 * tile], totals[2 * tile + 1], x.dtype.element_ty, shape)
        joined = (streams[tile].to(tl.float32) + total).to(residual.dtype.element_ty)
        tl.store(residual + here, joined)
        stream = joined.to(tl.float32)
        scaled = stream * weights[tile].to(tl.float32)
        tl.store(values + here, scaled.to(values.dtype.element_ty))
        tl.store(squares + first + tile, tl.sum(stream * stream, axis=0))


_into_stream_kernel = triton.jit(_into_stream)


def _from_stream(  # noqa: PLR0913
    x: tl.tensor,
    squares: tl.tensor,
    words: tl.tensor,
    headers: tl.tensor,
    out: tl.tensor,
    num_squares: tl.tensor,
    eps: tl.tensor,
    shape: tl.constexpr,
    SQUARES: tl.constexpr,  # noqa: N803
    IS_GELU: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (block of rows,)."""
    tiles: tl.constexpr = shape.tiles
    begun = hold_first(words, headers, shape)
    begin_dependent(IS_DEPENDENT)
    places = tl.arange(0, SQUARES)
    parts = tl.load(squares + places, mask=places < num_squares, other=0.0)
    totals = multiply_row(begun, x, shape, IS_PACKED)
    inverse_rms = tl.rsqrt(tl.sum(parts, axis=0) / shape.columns + eps)
    for tile in tl.static_range(tiles):
        total = tile_sums(totals[2 * tile], totals[2 * tile + 1], x.dtype.element_ty, shape)
        store_tile(out, total * inverse_rms, tl.program_id(0) * tiles + tile, shape, IS_GELU)


_from_stream_kernel = triton.jit(_from_stream)


def into_stream(
    x: torch.Tensor,
    kept: Int4Groups,
    shape: SkinnyShape,
    residual: torch.Tensor,
    norm_weight: torch.Tensor,
) -> UndividedRow:
    """residual (1, out_features) += x @ weight.T, in place, rounded once. x: as int4_mma.
    norm_weight: (out_features,). Raises ValueError as int4_mma, for splits, for other types than
    bfloat16 and for rows that are no whole blocks."""
    _check_stream(x, shape)
    if kept.out_features % shape.block_rows:
        raise ValueError(f"{kept.out_features} rows are no whole blocks of {shape.block_rows}")
    check_alignment(x, kept)
    compiled_for = mma_shape(kept, shape, is_gated=False)
    num_blocks = kept.out_features // shape.block_rows
    values = torch.empty_like(residual)
    squares = residual.new_empty(num_blocks * compiled_for.tiles, dtype=torch.float32)
    _into_stream_kernel[(num_blocks, 1)](
        x,
        kept.words,
        kept.headers,
        residual,
        norm_weight,
        values,
        squares,
        **launch_options(x, shape, compiled_for),
    )
    return UndividedRow(values, squares)


def from_stream(
    row: UndividedRow, kept: Int4Groups, shape: SkinnyShape, eps: float, gate: Gate
) -> torch.Tensor:
    """The activation, (1, out_features / 2), of a weight that is gate over up and a row that is
    divided by the root of its squares' mean and eps. Raises ValueError as into_stream."""
    x, squares = row.values, row.squares
    _check_stream(x, shape)
    check_alignment(x, kept)
    out = new_output(x, kept.out_features, shape, gate, torch.empty)
    compiled_for = mma_shape(kept, shape, is_gated=True)
    _from_stream_kernel[(triton.cdiv(kept.out_features, shape.block_rows), 1)](
        x,
        squares,
        kept.words,
        kept.headers,
        out,
        squares.shape[0],
        eps,
        SQUARES=next_power_of_2(squares.shape[0]),
        IS_GELU=gate == "gelu_tanh",
        **launch_options(x, shape, compiled_for),
    )
    return out[0]


def _check_stream(x: torch.Tensor, shape: SkinnyShape) -> None:
    if x.shape[0] != 1 or x.dtype != torch.bfloat16:
        raise ValueError(f"{x.shape[0]} rows of {x.dtype}, where one of bfloat16 is multiplied")
    if shape.num_splits != 1:
        raise ValueError(f"{shape.num_splits} splits, where the stream is joined by whole sums")
