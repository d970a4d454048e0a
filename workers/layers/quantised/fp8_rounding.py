"""Activations rounded to FP8 (E4M3), with a scale a row or one a group of 128 of a row.

Scales are found from the values at hand, in one launch. Knows no product.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch, next_power_of_2

_FP8_MAX = tl.constexpr(448.0)
_LEAST = tl.constexpr(1e-12)
"""Of a largest magnitude: rows of zeros have a scale, too."""
_LEAST_POWER = tl.constexpr(2.0**-100)
"""The same where scales are powers of two: both they and their inverses are normal float32."""
_EXPONENT = tl.constexpr(0x7F800000)
_ONE_OVER = tl.constexpr(254 << 23)
"""Minus a power of two's bits: its inverse's."""
_FP8_POWER = tl.constexpr(7 << 23)
"""2**7: magnitudes below twice that are E4M3's, whose largest is 448."""
_GROUP_SIZE = 128
_GROUPS = 16
_ROW_MULTIPLE = 4


class Rounded(NamedTuple):
    """values: float8_e4m3fn (rows, columns). scales: float32 (rows, groups), the rows' of one group
    lying together. There may be more rows than were rounded, which are of no value."""

    values: torch.Tensor
    scales: torch.Tensor


def _run_to_fp8(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """values: float32 (rows, columns) -> dtype, and the rows' scales."""
    scale = tl.maximum(tl.max(tl.abs(values), axis=1), _LEAST) / _FP8_MAX
    scaled = values / scale[:, None]
    # Not minimum and maximum: what is no number has to stay none.
    scaled = tl.where(scaled > _FP8_MAX, _FP8_MAX, tl.where(scaled < -_FP8_MAX, -_FP8_MAX, scaled))
    return scaled.to(dtype), scale


to_fp8 = triton.jit(_run_to_fp8)


def _run_to_fp8_by_powers(values: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """As to_fp8 with scales that are powers of two: a few integer operations a row and exact
    multiplications. A row's largest magnitude becomes 128 to 256. A row with an infinity has an
    infinite scale, so that what it is multiplied into is no finite number either."""
    largest = tl.maximum(tl.max(tl.abs(values), axis=1), _LEAST_POWER)
    power = largest.to(tl.int32, bitcast=True) & _EXPONENT
    inverse = (-(power - _FP8_POWER - _ONE_OVER)).to(tl.float32, bitcast=True)
    scale = power.to(tl.float32, bitcast=True) * (1.0 / 128.0)
    return (values * inverse[:, None]).to(dtype), scale


to_fp8_by_powers = triton.jit(_run_to_fp8_by_powers)


def _round_groups(  # noqa: PLR0913
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    num_columns: tl.tensor,
    scale_stride: tl.tensor,
    GROUP_SIZE: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (row, GROUPS of its groups)."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    lanes = tl.arange(0, BLOCK)
    columns = groups[:, None] * GROUP_SIZE + lanes[None, :]
    is_real = (lanes < GROUP_SIZE)[None, :] & (columns < num_columns)
    begin_dependent(IS_DEPENDENT)
    at = row * num_columns + columns
    part = tl.load(x + at, mask=is_real, other=0.0).to(tl.float32)
    rounded, scale = to_fp8(part, values.dtype.element_ty)
    tl.store(values + at, rounded, mask=is_real)
    is_group = groups * GROUP_SIZE < num_columns
    tl.store(scales + groups * scale_stride + row, scale, mask=is_group)


_round_groups_kernel = triton.jit(_round_groups, do_not_specialize=("scale_stride",))


def round_rows(x: torch.Tensor) -> Rounded:
    """x (n, columns), contiguous -> values (n, columns), scales (n, 1)."""
    values, scales = _rounded(x, x.shape[1], 1, x.shape[0])
    return Rounded(values, scales.flatten().unsqueeze(1))


def round_groups(x: torch.Tensor) -> Rounded:
    """x (n, columns), contiguous -> values (m, columns), scales (m, columns / 128): m is n rounded
    up to a multiple of 4, as block-scaled kernels read it."""
    num_rows = triton.cdiv(x.shape[0], _ROW_MULTIPLE) * _ROW_MULTIPLE
    return _rounded(x, _GROUP_SIZE, _GROUPS, num_rows)


def _rounded(x: torch.Tensor, group_size: int, groups: int, num_rows: int) -> Rounded:
    num_tokens, num_columns = x.shape
    num_groups = triton.cdiv(num_columns, group_size)
    values = torch.empty((num_rows, num_columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_groups, num_rows), dtype=torch.float32, device=x.device)
    is_dependent = dependent_launch(x)
    _round_groups_kernel[(num_tokens, triton.cdiv(num_groups, groups))](
        x,
        values,
        scales,
        num_columns,
        num_rows,
        GROUP_SIZE=group_size,
        GROUPS=groups,
        BLOCK=next_power_of_2(group_size),
        IS_DEPENDENT=is_dependent,
        num_warps=8 if group_size * groups > 4096 else 4,
        launch_pdl=is_dependent,
    )
    return Rounded(values, scales.t())
