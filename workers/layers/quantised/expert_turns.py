"""One turn, 128 columns, of a block's rows and a tile of an expert's kept weights, in registers.

Weights are the first operand, so that they go from registers to the tensor cores. A turn's sum is
one of its own: with one that goes on ptxas waits for every product. Knows no expert's bias or gate.
"""

import triton
import triton.language as tl

from workers.layers.kept.stacks import TURN, WORDS_PER_TURN
from workers.layers.quantised.fp4_values import fp4_values
from workers.layers.quantised.fp8_values import fp8_pairs, pair_columns

_TURN = tl.constexpr(TURN)
_QUARTER = tl.constexpr(TURN // 4)
_FP4_WORDS = tl.constexpr(WORDS_PER_TURN)
_FP8_WORDS = tl.constexpr(TURN // 4)


def _run_part(
    x_rows: tl.tensor,
    columns: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """(columns, ROWS) of x, zeros beyond DEPTH_SIZE. x_rows: pointers (ROWS,) to row beginnings."""
    if DEPTH_SIZE == DEPTH_SIZE // _TURN * _TURN:
        return tl.load(x_rows[:, None] + columns[None, :]).T
    else:  # noqa: RET505
        is_inner = (columns < DEPTH_SIZE)[None, :]
        return tl.load(x_rows[:, None] + columns[None, :], mask=is_inner, other=0.0).T


_part = triton.jit(_run_part)


def _run_turn_inputs(
    x_rows: tl.tensor,
    turn: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    IS_FP4: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """The turn's columns of x as add_turn takes them: quarters, or pairs by turns."""
    if IS_FP4:
        columns = tl.arange(0, _QUARTER) + turn * _TURN
        return (
            _part(x_rows, columns, DEPTH_SIZE),
            _part(x_rows, columns + _QUARTER, DEPTH_SIZE),
            _part(x_rows, columns + 2 * _QUARTER, DEPTH_SIZE),
            _part(x_rows, columns + 3 * _QUARTER, DEPTH_SIZE),
        )
    else:  # noqa: RET505
        columns = pair_columns(_FP8_WORDS) + turn * _TURN
        return _part(x_rows, columns, DEPTH_SIZE), _part(x_rows, columns + 2, DEPTH_SIZE)


turn_inputs = triton.jit(_run_turn_inputs)


def _run_add_turn(  # noqa: PLR0913
    total: tl.tensor,
    inputs: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    turn: tl.tensor,
    scale_stride: tl.tensor,
    dtype: tl.constexpr,
    IS_FP4: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """total + weights (COLUMNS, turn) @ inputs. weights: pointers (COLUMNS,) to words of turn 0;
    scales: (COLUMNS,) to those of turn 0."""
    scale = tl.load(scales + turn * scale_stride)
    if IS_FP4:
        lanes = tl.arange(0, _FP4_WORDS) + turn * _FP4_WORDS
        words = tl.load(weights[:, None] + lanes[None, :])
        one, two, three, four = fp4_values(words, scale, dtype, IS_PACKED)
        part = tl.dot(two, inputs[1], tl.dot(one, inputs[0]))
        return total + tl.dot(four, inputs[3], tl.dot(three, inputs[2], part))
    else:  # noqa: RET505
        lanes = tl.arange(0, _FP8_WORDS) + turn * _FP8_WORDS
        words = tl.load(weights[:, None] + lanes[None, :])
        first, last = fp8_pairs(words, dtype, IS_PACKED)
        return total + tl.dot(last, inputs[1], tl.dot(first, inputs[0])) * scale[:, None]


add_turn = triton.jit(_run_add_turn)


def _run_turns_of(
    split: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    NUM_SPLITS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """The first of a split's turns and the one behind its last: splits differ by a turn at most."""
    NUM_TURNS: tl.constexpr = (DEPTH_SIZE + _TURN - 1) // _TURN  # noqa: N806
    if NUM_SPLITS == 1:
        return 0, NUM_TURNS
    else:  # noqa: RET505
        return split * NUM_TURNS // NUM_SPLITS, (split + 1) * NUM_TURNS // NUM_SPLITS


turns_of = triton.jit(_run_turns_of)


def _run_sum_turns(  # noqa: PLR0913
    x_rows: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    split: tl.tensor,
    scale_stride: tl.tensor,
    dtype: tl.constexpr,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    IS_FP4: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """float32 (COLUMNS, ROWS): weights @ x over the split's turns. Pointers as add_turn takes."""
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    first_turn, end_turn = turns_of(split, DEPTH_SIZE, NUM_SPLITS)
    for turn in range(first_turn, end_turn):
        inputs = turn_inputs(x_rows, turn, DEPTH_SIZE, IS_FP4)
        total = add_turn(
            total, inputs, weights, scales, turn, scale_stride, dtype, IS_FP4, IS_PACKED
        )
    return total


sum_turns = triton.jit(_run_sum_turns)


def _run_weight_rows(
    weights: tl.tensor,
    row: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    IS_FP4: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Pointers to rows' beginnings. weights: of words; row: int64 (COLUMNS,), of all experts'."""
    if IS_FP4:
        return weights + row * ((DEPTH_SIZE + _TURN - 1) // _TURN * _FP4_WORDS)
    else:  # noqa: RET505
        return weights + row * (DEPTH_SIZE // _TURN * _FP8_WORDS)


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
