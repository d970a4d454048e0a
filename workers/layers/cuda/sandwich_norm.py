"""RMSNorm of a block's output, its residual addition and the next block's RMSNorm, in one kernel.

What Gemma 2 and 3 do between two products (Ding et al., 2021, call norms on both sides of a block a
sandwich). The kernel also takes the sum over the product's K splits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch, next_power_of_2
from workers.layers.cuda.norm import is_wide

_ELEMENTS_PER_WARP = 512
_MAX_WARPS = 16


@dataclass(frozen=True, slots=True)
class NormScale:
    """What an RMSNorm multiplies by, float32 (hidden_size,), before the result is rounded."""

    scale: torch.Tensor
    eps: float


def _sandwich_norm(  # noqa: PLR0913
    partials: tl.tensor,
    residual: tl.tensor,
    after_scale: tl.tensor,
    before_scale: tl.tensor,
    hidden: tl.tensor,
    split_stride: tl.tensor,
    hidden_size: tl.tensor,
    after_eps: tl.tensor,
    before_eps: tl.tensor,
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    IS_WIDE: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """One row a program. Rounded where separate kernels would have stored: the same values.
    IS_WIDE: as is_wide."""
    dtype: tl.constexpr = residual.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    is_real = columns < hidden_size
    after = tl.load(after_scale + columns, mask=is_real, other=0.0)
    before = tl.load(before_scale + columns, mask=is_real, other=0.0)
    begin_dependent(IS_DEPENDENT)
    at = row * hidden_size + columns
    stream = tl.load(residual + at, mask=is_real, other=0.0).to(tl.float32)
    stride = split_stride.to(tl.int64) if IS_WIDE else split_stride
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        part = tl.load(partials + split * stride + at, mask=is_real, other=0.0)
        total += part.to(tl.float32)
    output = total.to(dtype).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(output * output, axis=0) / hidden_size + after_eps)
    stream += (output * inverse_rms * after).to(dtype).to(tl.float32)
    rounded = stream.to(dtype)
    tl.store(residual + at, rounded, mask=is_real)
    stream = rounded.to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(stream * stream, axis=0) / hidden_size + before_eps)
    tl.store(hidden + at, (stream * inverse_rms * before).to(dtype), mask=is_real)


_sandwich_norm_kernel = triton.jit(_sandwich_norm)


def add_sandwich_norm_(
    partials: torch.Tensor, residual: torch.Tensor, after: NormScale, before: NormScale
) -> torch.Tensor:
    """residual += RMSNorm by after of partials.sum(0), in place; returns the RMSNorm by before of
    the new residual, in a new tensor.

    partials: (splits, n, hidden_size), float32 or residual's dtype. residual: (n, hidden_size).
    All contiguous. The sum is taken in float32 and rounded to residual's dtype.
    """
    num_tokens, hidden_size = residual.shape
    hidden = torch.empty_like(residual)
    block = next_power_of_2(hidden_size)
    is_dependent = dependent_launch(residual)
    _sandwich_norm_kernel[(num_tokens,)](
        partials,
        residual,
        after.scale,
        before.scale,
        hidden,
        num_tokens * hidden_size,
        hidden_size,
        after.eps,
        before.eps,
        NUM_SPLITS=partials.shape[0],
        BLOCK=block,
        IS_WIDE=is_wide(partials.shape[0], residual.numel()),
        IS_DEPENDENT=is_dependent,
        num_warps=min(_MAX_WARPS, max(1, block // _ELEMENTS_PER_WARP)),
        launch_pdl=is_dependent,
    )
    return hidden
