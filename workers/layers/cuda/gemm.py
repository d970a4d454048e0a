"""Triton GEMMs for few tokens, where a GEMM's time is that of reading its weights once.

Two kernels over weights (out_features, in_features): dot products on CUDA cores for one token, and
tensor cores with the weights as the large operand for up to 256. Both can split in_features over
programs; the partial sums are then left to the kernel that reads them. Before they wait for their
predecessor they ask for their first weights to come to L2: weights do not depend on it.
Knows no layer and makes no choice; gated_gemm.py has the same two with an activation.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl

from workers.layers.cuda.device_limits import DeviceLimits
from workers.layers.cuda.launch import (
    begin_dependent,
    dependent_launch,
    next_power_of_2,
    prefetch_chunks,
    prefetch_lines,
)
from workers.layers.new_tensor import NewTensor

MAX_TOKENS = 256
MAX_TILED_TOKENS = 512
LINE_BYTES = tl.constexpr(128)
_MIN_DOT_TOKENS = 16
_MAX_TILE_TOKENS = 256
PREFETCH_BUDGET_BYTES = 20 << 20
"""Of all programs of a launch: what comes to L2 while a small predecessor runs."""
_MIN_PREFETCH_BYTES = 128
MAX_LINE_PREFETCH_BYTES = 1024
_OPERAND_BYTES = 2
_SUM_BYTES = 4
_GEMV_SHARED_BYTES = 8 << 10
_TURNING_BYTES = 17 << 10
"""To turn sums over beside the next tile's operands; elsewhere they take the operands' place."""


def block_tokens(num_tokens: int) -> int:
    return max(_MIN_DOT_TOKENS, next_power_of_2(num_tokens))


def tile_tokens(num_tokens: int) -> int:
    """Of one tile, where tiles share the tokens out."""
    return min(_MAX_TILE_TOKENS, block_tokens(num_tokens))


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """One way to compute x @ weight.T.

    kind: "gemv" for exactly one token, "skinny" for up to MAX_TOKENS, "tiled" for up to
    MAX_TILED_TOKENS; "gated_gemv", "gated" and "gated_tiled" are these with the activation of a
    gated block. block_rows: output features of a tile, after the activation. block_k, num_splits,
    num_stages, num_warps: as usual; in_features must be a multiple of num_splits * block_k.
    """

    kind: Literal["gemv", "skinny", "tiled", "gated_gemv", "gated", "gated_tiled"]
    block_rows: int
    block_k: int
    num_splits: int
    num_stages: int
    num_warps: int

    @property
    def is_gated(self) -> bool:
        """Whether it leaves activations instead of a product."""
        return self.kind in ("gated_gemv", "gated", "gated_tiled")

    @property
    def is_tiled(self) -> bool:
        """Whether its loads are by tensor maps."""
        return self.kind in ("tiled", "gated_tiled")

    @property
    def is_gemv(self) -> bool:
        return self.kind in ("gemv", "gated_gemv")

    def fits(self, num_tokens: int, in_features: int, limits: DeviceLimits) -> bool:
        """Whether a device of these limits can compute it."""
        if in_features % (self.num_splits * self.block_k):
            return False
        if self.is_gemv:
            return num_tokens == 1
        if self.is_tiled and not limits.has_copy_engine:
            return False
        max_tokens = MAX_TILED_TOKENS if self.is_tiled else MAX_TOKENS
        return num_tokens <= max_tokens and self.shared_bytes(num_tokens) <= limits.shared_bytes

    def shared_bytes(self, num_tokens: int) -> int:
        """The most that a program's tiles take of shared memory, on any generation."""
        if self.is_gemv:
            return _GEMV_SHARED_BYTES
        tokens = tile_tokens(num_tokens) if self.is_tiled else block_tokens(num_tokens)
        rows = self.block_rows * (2 if self.is_gated else 1)
        operands = self.num_stages * (rows + tokens) * self.block_k * _OPERAND_BYTES
        if self.is_tiled:
            return operands + _TURNING_BYTES
        return max(operands, rows * tokens * _SUM_BYTES)


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
    budget = min(PREFETCH_BUDGET_BYTES // num_rows, k_per_split * _OPERAND_BYTES)
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
