"""Triton GEMMs for few tokens, where a GEMM's time is that of reading its weights once.

Two kernels over weights (out_features, in_features): dot products on CUDA cores for one token, and
tensor cores with the weights as the large operand for up to 256. Both can split in_features over
programs; the partial sums are then left to the kernel that reads them. Two more do the same for a
gated feed-forward block: the gate's and the up projection's rows of one output feature meet in one
program, so that neither product ever leaves it. Before they wait for their predecessor all ask for
their first weights to come to L2: weights do not depend on it. Knows no layer and makes no choice.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from workers.layers.cuda.activation import bent
from workers.layers.cuda.launch import (
    begin_dependent,
    dependent_launch,
    next_power_of_2,
    prefetch_chunks,
    prefetch_lines,
)
from workers.layers.gate import Gate
from workers.layers.gemm.configs import OPERAND_BYTES, GemmConfig, block_tokens
from workers.layers.new_tensor import NewTensor

LINE_BYTES = tl.constexpr(128)
PREFETCH_BUDGET_BYTES = 20 << 20
"""Of all programs of a launch: what comes to L2 while a small predecessor runs."""
_MIN_PREFETCH_BYTES = 128
MAX_LINE_PREFETCH_BYTES = 1024


def _run_prefetch_rows(
    weight: tl.tensor,
    rows: tl.tensor,
    first_k: tl.tensor,
    in_features: tl.tensor,
    PREFETCH_BYTES: tl.constexpr,  # noqa: N803
) -> None:
    """PREFETCH_BYTES of each row, from column first_k on, by the copy engine."""
    prefetch_chunks((weight + rows * in_features + first_k).to(tl.int64), PREFETCH_BYTES)


prefetch_rows = triton.jit(_run_prefetch_rows)


def _run_prefetch_row_lines(
    weight: tl.tensor,
    rows: tl.tensor,
    first_k: tl.tensor,
    in_features: tl.tensor,
    PREFETCH_BYTES: tl.constexpr,  # noqa: N803
) -> None:
    """The same by loads of single lines: measured to be faster for the skinny kernel."""
    lines = tl.arange(0, PREFETCH_BYTES // LINE_BYTES)[None, :] * (LINE_BYTES // 2)
    prefetch_lines((weight + rows[:, None] * in_features + first_k + lines).to(tl.int64))


prefetch_row_lines = triton.jit(_run_prefetch_row_lines)


def _gemv(  # noqa: PLR0913
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    k_per_split: tl.tensor,
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    PREFETCH_BYTES: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    safe_rows = tl.minimum(rows, out_features - 1).to(tl.int64)
    first_k = split * k_per_split
    if IS_DEPENDENT:
        prefetch_rows(weight, safe_rows, first_k, in_features, PREFETCH_BYTES)
    begin_dependent(IS_DEPENDENT)
    ks = first_k + tl.arange(0, BLOCK_K)
    weights = weight + safe_rows[:, None] * in_features + ks[None, :]
    products = tl.zeros((BLOCK_ROWS, BLOCK_K), dtype=tl.float32)
    for start in range(0, k_per_split, BLOCK_K):
        values = tl.load(x + ks + start).to(tl.float32)
        tile = tl.load(weights + start, eviction_policy="evict_first").to(tl.float32)
        products += tile * values[None, :]
    total = tl.sum(products, axis=1).to(out.dtype.element_ty)
    tl.store(out + split * out_features + rows, total, mask=rows < out_features)


_gemv_kernel = triton.jit(_gemv)


def _skinny(  # noqa: PLR0913
    x: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    k_per_split: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    PREFETCH_BYTES: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    safe_rows = tl.minimum(rows, out_features - 1).to(tl.int64)
    first_k = split * k_per_split
    if IS_DEPENDENT:
        prefetch_row_lines(weight, safe_rows, first_k, in_features, PREFETCH_BYTES)
    begin_dependent(IS_DEPENDENT)
    tokens = tl.arange(0, BLOCK_TOKENS)
    is_token = tokens[:, None] < num_tokens
    ks = first_k + tl.arange(0, BLOCK_K)
    weights = weight + safe_rows[:, None] * in_features + ks[None, :]
    values = x + tokens[:, None] * in_features + ks[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
    for start in range(0, k_per_split, BLOCK_K):
        tile = tl.load(weights + start)
        inputs = tl.load(values + start, mask=is_token, other=0.0)
        total = tl.dot(tile, tl.trans(inputs), total)
    target = out + (split * num_tokens + tokens[:, None]).to(tl.int64) * out_features
    is_real = is_token & (rows[None, :] < out_features)
    tl.store(target + rows[None, :], tl.trans(total).to(out.dtype.element_ty), mask=is_real)


_skinny_kernel = triton.jit(_skinny, do_not_specialize=("num_tokens",))


def prefetch_bytes(kind: str, num_rows: int, k_per_split: int) -> int:
    """Of each row that a program reads: a power of two, all programs' within the budget."""
    budget = min(PREFETCH_BUDGET_BYTES // num_rows, k_per_split * OPERAND_BYTES)
    most = MAX_LINE_PREFETCH_BYTES if kind == "skinny" else budget
    return max(_MIN_PREFETCH_BYTES, next_power_of_2(min(budget, most) + 1) // 2)


def kernel_options(
    config: GemmConfig, num_rows: int, k_per_split: int, is_dependent: bool
) -> dict[str, Any]:
    return {
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_K": config.block_k,
        "PREFETCH_BYTES": prefetch_bytes(config.kind, num_rows, k_per_split),
        "IS_DEPENDENT": is_dependent,
        "num_stages": config.num_stages,
        "num_warps": config.num_warps,
        "launch_pdl": is_dependent,
    }


def triton_gemm(
    x: torch.Tensor, weight: torch.Tensor, config: GemmConfig, new: NewTensor = torch.empty
) -> torch.Tensor:
    """x (n, in_features) @ weight (out_features, in_features).T -> (splits, n, out_features).

    Both contiguous. The result is in x's dtype for one split, float32 for several: their sum is
    the product. config.fits(n, in_features) must hold.
    """
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    out_dtype = x.dtype if config.num_splits == 1 else torch.float32
    out = new((config.num_splits, num_tokens, out_features), dtype=out_dtype, device=x.device)
    is_dependent = dependent_launch(x)
    grid = (triton.cdiv(out_features, config.block_rows), config.num_splits)
    k_per_split = in_features // config.num_splits
    options = kernel_options(config, out_features * config.num_splits, k_per_split, is_dependent)
    if config.kind == "gemv":
        _gemv_kernel[grid](x, weight, out, out_features, in_features, k_per_split, **options)
        return out
    _skinny_kernel[grid](
        x,
        weight,
        out,
        num_tokens,
        out_features,
        in_features,
        k_per_split,
        BLOCK_TOKENS=block_tokens(num_tokens),
        **options,
    )
    return out


def _run_activate(
    gate: tl.tensor,
    up: tl.tensor,
    IS_GELU: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """bent(gate) * up, rounded where separate kernels would have stored: the same values."""
    gate = gate.to(DTYPE).to(tl.float32)
    activated = bent(gate, IS_GELU).to(DTYPE).to(tl.float32)
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
    IS_GELU: tl.constexpr,  # noqa: N803
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
    result = activate(tl.sum(gate, axis=1), tl.sum(up, axis=1), IS_GELU, out.dtype.element_ty)
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
    IS_GELU: tl.constexpr,  # noqa: N803
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
    result = activate(gate, up, IS_GELU, out.dtype.element_ty)
    target = out + tokens[:, None].to(tl.int64) * width + rows[None, :]
    tl.store(target, tl.trans(result), mask=is_token & (rows[None, :] < width))


_gated_kernel = triton.jit(_gated, do_not_specialize=("num_tokens",))


def triton_gated_gemm(
    x: torch.Tensor, weight: torch.Tensor, config: GemmConfig, gate: Gate
) -> torch.Tensor:
    """gate(x @ gate.T) * (x @ up.T) -> (n, width), weight (2 * width, in_features) being both.

    config.kind is "gated_gemv" or "gated", its num_splits 1.
    """
    num_tokens, in_features = x.shape
    width = weight.shape[0] // 2
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(width, config.block_rows),)
    options = kernel_options(config, 2 * width, in_features, dependent_launch(x))
    options["IS_GELU"] = gate == "gelu_tanh"
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
