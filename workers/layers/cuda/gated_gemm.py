"""Triton GEMMs of a gated feed-forward block for few tokens: gate, up and activation in one kernel.

The gate's and the up projection's rows of one output feature meet in one program, so that neither
product ever leaves it. As gemm.py in all else.
"""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.gemm import (
    GemmConfig,
    block_tokens,
    kernel_options,
    prefetch_rows,
)
from workers.layers.cuda.launch import begin_dependent, dependent_launch


def _run_activate(gate: tl.tensor, up: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:  # noqa: N803
    """silu(gate) * up, rounded where separate kernels would have stored: the same values."""
    gate = gate.to(DTYPE).to(tl.float32)
    activated = (gate * tl.sigmoid(gate)).to(DTYPE).to(tl.float32)
    return (activated * up.to(DTYPE).to(tl.float32)).to(DTYPE)


activate = triton.jit(_run_activate)


def _gated_gemv(  # noqa: PLR0913
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    width: tl.tensor,
    in_features: tl.tensor,
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    PREFETCH_BYTES: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    gate_rows = tl.minimum(rows, width - 1).to(tl.int64)
    up_rows = gate_rows + width
    if IS_DEPENDENT:
        prefetch_rows(weight, gate_rows, 0, in_features, PREFETCH_BYTES)
        prefetch_rows(weight, up_rows, 0, in_features, PREFETCH_BYTES)
    begin_dependent(IS_DEPENDENT)
    ks = tl.arange(0, BLOCK_K)
    gate_weights = weight + gate_rows[:, None] * in_features + ks[None, :]
    up_weights = weight + up_rows[:, None] * in_features + ks[None, :]
    gate = tl.zeros((BLOCK_ROWS, BLOCK_K), dtype=tl.float32)
    up = tl.zeros((BLOCK_ROWS, BLOCK_K), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        values = tl.load(x + ks + start).to(tl.float32)[None, :]
        gate += tl.load(gate_weights + start).to(tl.float32) * values
        up += tl.load(up_weights + start).to(tl.float32) * values
    result = activate(tl.sum(gate, axis=1), tl.sum(up, axis=1), out.dtype.element_ty)
    tl.store(out + rows, result, mask=rows < width)


_gated_gemv_kernel = triton.jit(_gated_gemv)


def _gated(  # noqa: PLR0913
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    width: tl.tensor,
    in_features: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    PREFETCH_BYTES: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Rows [0, width) of weight are the gate's, the next width rows the up projection's."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    gate_rows = tl.minimum(rows, width - 1).to(tl.int64)
    up_rows = gate_rows + width
    if IS_DEPENDENT:
        prefetch_rows(weight, gate_rows, 0, in_features, PREFETCH_BYTES)
        prefetch_rows(weight, up_rows, 0, in_features, PREFETCH_BYTES)
    begin_dependent(IS_DEPENDENT)
    tokens = tl.arange(0, BLOCK_TOKENS)
    is_token = tokens[:, None] < num_tokens
    ks = tl.arange(0, BLOCK_K)
    gate_weights = weight + gate_rows[:, None] * in_features + ks[None, :]
    up_weights = weight + up_rows[:, None] * in_features + ks[None, :]
    values = x + tokens[:, None] * in_features + ks[None, :]
    gate = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
    up = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        inputs = tl.trans(tl.load(values + start, mask=is_token, other=0.0))
        gate = tl.dot(tl.load(gate_weights + start), inputs, gate)
        up = tl.dot(tl.load(up_weights + start), inputs, up)
    result = activate(gate, up, out.dtype.element_ty)
    target = out + tokens[:, None].to(tl.int64) * width + rows[None, :]
    tl.store(target, tl.trans(result), mask=is_token & (rows[None, :] < width))


_gated_kernel = triton.jit(_gated, do_not_specialize=("num_tokens",))


def triton_gated_gemm(x: torch.Tensor, weight: torch.Tensor, config: GemmConfig) -> torch.Tensor:
    """silu(x @ gate.T) * (x @ up.T) -> (n, width), weight (2 * width, in_features) being both.

    config.kind is "gated_gemv" or "gated", its num_splits 1.
    """
    num_tokens, in_features = x.shape
    width = weight.shape[0] // 2
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(width, config.block_rows),)
    options = kernel_options(config, 2 * width, in_features, dependent_launch(x))
    if config.kind == "gated_gemv":
        _gated_gemv_kernel[grid](x, weight, out, width, in_features, **options)
        return out
    _gated_kernel[grid](
        x,
        weight,
        out,
        num_tokens,
        width,
        in_features,
        BLOCK_TOKENS=block_tokens(num_tokens),
        **options,
    )
    return out
