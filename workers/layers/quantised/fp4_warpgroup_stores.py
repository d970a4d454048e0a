"""Gluon, sm90: what a warpgroup stores of its products with MXFP4 experts. Imports Triton.

Everywhere: total is a warpgroup's sums, float32 (64, tokens), span a block's expert, first place
and number of tokens, column_tile which of the output's tiles it is, shape a WarpgroupShape.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from workers.layers.quantised.fp4_warpgroup_parts import BOX_ROWS, GROUP_ROWS, store_layout

_LOG2_E = gl.constexpr(1.4426950408889634)
_SIGMOID = gl.constexpr(
    "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }"
)
_ROUNDED = gl.constexpr(
    "{ .reg .b32 both; cvt.rn.bf16x2.f32 both, $3, $2; shl.b32 $0, both, 16; "
    "and.b32 $1, both, 0xFFFF0000; }"
)


def _sigmoid(values: gl.tensor, alpha: gl.constexpr) -> gl.tensor:
    """Of alpha * values, within a few of float32's last bits; subnormal results are zeros."""
    return gl.inline_asm_elementwise(
        _SIGMOID, "=f,f", [values * (-alpha * _LOG2_E)], dtype=gl.float32, is_pure=True, pack=1
    )


sigmoid = gluon.jit(_sigmoid)


def _rounded(values: gl.tensor) -> gl.tensor:
    """float32 -> bfloat16 -> float32, two at once: one at a time is a sixteenth as fast."""
    return gl.inline_asm_elementwise(
        _ROUNDED, "=r,=r,r,r", [values], dtype=gl.float32, is_pure=True, pack=2
    )


rounded = gluon.jit(_rounded)


def _gated(gate: gl.tensor, up: gl.tensor, dtype: gl.constexpr, shape: gl.constexpr) -> gl.tensor:
    """As expert_gating.gated, into bfloat16."""
    if shape.limit > 0:
        # Not minimum and maximum: what is no number has to stay none.
        gate = gl.where(gate > shape.limit, shape.limit, gate)
        up = gl.where(up > shape.limit, shape.limit, gl.where(up < -shape.limit, -shape.limit, up))
        up = up + 1.0
    return (rounded(gate * sigmoid(gate, shape.alpha)) * up).to(dtype)


gated = gluon.jit(_gated)


def _store_gated(
    total: gl.tensor,
    bias: gl.tensor,
    out: gl.tensor,
    span: gl.tensor,
    column_tile: gl.tensor,
    tokens: gl.constexpr,
    part: gl.constexpr,
    shape: gl.constexpr,
) -> None:
    """What a warpgroup's 32 gates leave, at their places by expert."""
    expert, first, num_tokens = span
    layout: gl.constexpr = store_layout(tokens, True)
    pairs = total.reshape([4, 2, 8, tokens]).permute([0, 2, 3, 1])
    gate, up = gl.split(pairs)
    gate = gl.convert_layout(gate.reshape([BOX_ROWS, tokens]), layout, assert_trivial=True)
    up = gl.convert_layout(up.reshape([BOX_ROWS, tokens]), layout, assert_trivial=True)
    column = column_tile * GROUP_ROWS + part * BOX_ROWS
    columns = column + gl.arange(0, BOX_ROWS, gl.SliceLayout(1, layout))
    is_column = columns < shape.width
    if shape.has_bias:
        bias_at = bias + expert * (2 * shape.width) + columns
        gate += gl.load(bias_at, mask=is_column, other=0.0).to(gl.float32)[:, None]
        up += gl.load(bias_at + shape.width, mask=is_column, other=0.0).to(gl.float32)[:, None]
    dtype: gl.constexpr = out.dtype.element_ty
    rows = gl.arange(0, tokens, gl.SliceLayout(0, layout))
    at = out + (first + rows).to(gl.int64)[None, :] * shape.width + columns[:, None]
    is_real = (rows < num_tokens)[None, :] & is_column[:, None]
    gl.store(at, gated(gate, up, dtype, shape), mask=is_real)


store_gated = gluon.jit(_store_gated)


def _store_weighed(  # noqa: PLR0913
    total: gl.tensor,
    bias: gl.tensor,
    weights: gl.tensor,
    pairs: gl.tensor,
    out: gl.tensor,
    span: gl.tensor,
    column_tile: gl.tensor,
    out_tokens: gl.tensor,
    tokens: gl.constexpr,
    part: gl.constexpr,
    shape: gl.constexpr,
) -> None:
    """A warpgroup's 64 columns times their tokens' weights, at (choice, token)."""
    expert, first, num_tokens = span
    layout: gl.constexpr = store_layout(tokens, False)
    values = total.reshape([4, 2, 8, tokens]).permute([0, 2, 1, 3]).reshape([GROUP_ROWS, tokens])
    values = gl.convert_layout(values, layout, assert_trivial=True)
    column = column_tile * (2 * GROUP_ROWS) + part * GROUP_ROWS
    columns = column + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout))
    is_column = columns < shape.width
    if shape.has_bias:
        bias_at = bias + expert * shape.width + columns
        values += gl.load(bias_at, mask=is_column, other=0.0).to(gl.float32)[:, None]
    # A lane looks up its own tokens' pairs and gets the others' by way of shared memory.
    lanes: gl.constexpr = gl.BlockedLayout([max(1, tokens // 128)], [32], [4], [0])
    rows = gl.arange(0, tokens, lanes)
    pair = gl.load(pairs + first + rows, mask=rows < num_tokens, other=0)
    weight = gl.load(weights + pair, mask=rows < num_tokens, other=0.0)
    to = pair % shape.num_chosen * out_tokens + pair // shape.num_chosen
    token: gl.constexpr = gl.SliceLayout(0, layout)
    product = (values * gl.convert_layout(weight, token)[None, :]).to(out.dtype.element_ty)
    to = gl.convert_layout(gl.where(rows < num_tokens, to, -1), token)
    at = out + to.to(gl.int64)[None, :] * shape.width + columns[:, None]
    gl.store(at, product, mask=(to >= 0)[None, :] & is_column[:, None])


store_weighed = gluon.jit(_store_weighed)
