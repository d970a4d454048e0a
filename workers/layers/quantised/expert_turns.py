"""One turn, 128 columns, of a block's rows and a tile of an expert's kept weights, in registers.

Weights are the first operand, so that they go from registers to the tensor cores. Knows no expert's
bias or gate.
"""

import triton
import triton.language as tl

from workers.layers.kept.stacks import TURN, VALUES_PER_WORD, WORDS_PER_TURN
from workers.layers.quantised.fp4_values import fp4_values

_TURN = tl.constexpr(TURN)
_SHIFTS = tl.constexpr(VALUES_PER_WORD)
_WORDS = tl.constexpr(WORDS_PER_TURN)


def _run_fp4_turn(
    total: tl.tensor,
    x_rows: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    turn: tl.tensor,
    scale_stride: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """total + weights (COLUMNS, turn) @ x (ROWS, turn).T. x_rows: pointers (ROWS,) to rows'
    beginnings; weights: (COLUMNS,) to words of turn 0; scales: (COLUMNS,) to those of turn 0."""
    lanes = tl.arange(0, _WORDS)
    dtype = x_rows.dtype.element_ty
    words = tl.load(weights[:, None] + (lanes + turn * _WORDS)[None, :])
    values = fp4_values(words, tl.load(scales + turn * scale_stride), dtype, IS_PACKED)
    for shift in tl.static_range(_SHIFTS):
        columns = lanes + (turn * _TURN + shift * _WORDS)
        is_inner = (columns < DEPTH_SIZE)[None, :]
        inputs = tl.load(x_rows[:, None] + columns[None, :], mask=is_inner, other=0.0)
        total = tl.dot(values[shift], inputs.T, total)
    return total


fp4_turn = triton.jit(_run_fp4_turn)


def _run_fp8_turn(
    total: tl.tensor,
    x_rows: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    turn: tl.tensor,
    scale_stride: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """The same of FP8 in blocks. DEPTH_SIZE is whole turns."""
    columns = tl.arange(0, _TURN) + turn * _TURN
    tile = tl.load(weights[:, None] + columns[None, :]).to(x_rows.dtype.element_ty)
    inputs = tl.load(x_rows[:, None] + columns[None, :])
    return total + tl.dot(tile, inputs.T) * tl.load(scales + turn * scale_stride)[:, None]


fp8_turn = triton.jit(_run_fp8_turn)


def _run_add_turn(  # noqa: PLR0913
    total: tl.tensor,
    x_rows: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    turn: tl.tensor,
    scale_stride: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    IS_FP4: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    if IS_FP4:
        return fp4_turn(total, x_rows, weights, scales, turn, scale_stride, DEPTH_SIZE, IS_PACKED)
    else:  # noqa: RET505
        return fp8_turn(total, x_rows, weights, scales, turn, scale_stride, DEPTH_SIZE, IS_PACKED)


add_turn = triton.jit(_run_add_turn)


def _run_weight_rows(
    weights: tl.tensor,
    row: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    IS_FP4: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Pointers to rows' beginnings. row: int64 (COLUMNS,), of all experts' rows."""
    if IS_FP4:
        return weights + row * ((DEPTH_SIZE + _TURN - 1) // _TURN * _WORDS)
    else:  # noqa: RET505
        return weights + row * DEPTH_SIZE


weight_rows = triton.jit(_run_weight_rows)


def _run_scale_rows(
    scales: tl.tensor,
    expert: tl.tensor,
    row: tl.tensor,
    NUM_ROWS: tl.constexpr,  # noqa: N803
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    IS_FP4: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Pointers to the rows' scales of turn 0. row: within the expert's NUM_ROWS."""
    if IS_FP4:
        return scales + expert * ((DEPTH_SIZE + _TURN - 1) // _TURN * NUM_ROWS) + row
    else:  # noqa: RET505
        return scales + (expert * NUM_ROWS + row) // _TURN * (DEPTH_SIZE // _TURN)


scale_rows = triton.jit(_run_scale_rows)
