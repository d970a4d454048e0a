"""Kept stacks of experts as matrices of 16 bits, for products of many rows. Knows no product."""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch
from workers.layers.kept.experts import Stack
from workers.layers.kept.stacks import TURN, WORDS_PER_TURN, Fp4Stack
from workers.layers.quantised.fp4_values import fp4_values

_TURN = tl.constexpr(TURN)
_QUARTER = tl.constexpr(TURN // 4)
_WORDS = tl.constexpr(WORDS_PER_TURN)
_BLOCK_ROWS = 64


def _fp4_spread(  # noqa: PLR0913
    words: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_turns: tl.tensor,
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (turn, block of rows, matrix)."""
    begin_dependent(IS_DEPENDENT)
    turn, matrix = tl.program_id(0), tl.program_id(2).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_row = rows < num_rows
    row = matrix * num_rows + rows
    words_at = words + (row * num_turns + turn)[:, None] * _WORDS + tl.arange(0, _WORDS)[None, :]
    packed = tl.load(words_at, mask=is_row[:, None], other=0)
    scales_at = scales + (matrix * num_turns + turn) * num_rows + rows
    turn_scales = tl.load(scales_at, mask=is_row, other=0)
    values = fp4_values(packed, turn_scales, out.dtype.element_ty, IS_PACKED)
    for quarter in tl.static_range(4):
        columns = turn * _TURN + quarter * _QUARTER + tl.arange(0, _QUARTER)
        is_real = is_row[:, None] & (columns < num_columns)[None, :]
        tl.store(out + row[:, None] * num_columns + columns[None, :], values[quarter], mask=is_real)


_fp4_spread_kernel = triton.jit(_fp4_spread)


def _fp8_spread(
    values: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    num_turns: tl.tensor,
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """The same, of whole blocks: BLOCK_ROWS divides one. Of no table's choice: it is what the sweep
    of benchmarks/h200/quantised_experts.py measures FP8's other ways against on a new GPU."""
    begin_dependent(IS_DEPENDENT)
    turn, first = tl.program_id(0), tl.program_id(1) * BLOCK_ROWS
    row = tl.program_id(2).to(tl.int64) * num_rows + first + tl.arange(0, BLOCK_ROWS)
    columns = turn * _TURN + tl.arange(0, _TURN)
    at = row[:, None] * num_columns + columns[None, :]
    block = (tl.program_id(2).to(tl.int64) * num_rows + first) // _TURN
    scale = tl.load(scales + block * num_turns + turn)
    spread = tl.load(values + at).to(tl.float32) * scale
    tl.store(out + at, spread.to(out.dtype.element_ty))


_fp8_spread_kernel = triton.jit(_fp8_spread)


def spread(stack: Stack, dtype: torch.dtype) -> torch.Tensor:
    """(matrices, rows, columns) of dtype, each element rounded once: MXFP4's not at all."""
    size = stack.num_matrices, stack.rows, stack.columns
    out = torch.empty(size, dtype=dtype, device=stack.scales.device)
    is_dependent = dependent_launch(out)
    grid = stack.num_turns, triton.cdiv(stack.rows, _BLOCK_ROWS), stack.num_matrices
    sizes = stack.rows, stack.columns, stack.num_turns
    launch = {"BLOCK_ROWS": _BLOCK_ROWS, "num_warps": 4, "launch_pdl": is_dependent}
    launch["IS_DEPENDENT"] = is_dependent
    if isinstance(stack, Fp4Stack):
        is_packed = out.is_cuda
        _fp4_spread_kernel[grid](
            stack.words, stack.scales, out, *sizes, IS_PACKED=is_packed, **launch
        )
    else:
        _fp8_spread_kernel[grid](stack.values, stack.scales, out, *sizes, **launch)
    return out
