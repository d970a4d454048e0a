"""Gate-and-multiply, by SiLU or GELU, fused with the sum over a GEMM's K splits."""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch
from workers.layers.gate import Gate

_BLOCK = 1024
_TWICE_ROOT_2_OVER_PI = tl.constexpr(1.5957691216057308)
_CUBE_SHARE = tl.constexpr(0.044715)


def _run_bent(gate: tl.tensor, IS_GELU: tl.constexpr) -> tl.tensor:  # noqa: N803
    """silu(gate), or GELU by its approximation with tanh (Hendrycks and Gimpel, 2016): as
    0.5 * (1 + tanh(z)) is sigmoid(2 * z), either is gate times a sigmoid."""
    if IS_GELU:
        inner = _TWICE_ROOT_2_OVER_PI * (gate + _CUBE_SHARE * gate * gate * gate)
        return gate * tl.sigmoid(inner)
    else:  # noqa: RET505 - Triton takes one of two branches that both return
        return gate * tl.sigmoid(gate)


bent = triton.jit(_run_bent)


def _gate_and_mul(
    partials: tl.tensor,
    out: tl.tensor,
    split_stride: tl.tensor,
    width: tl.tensor,
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    IS_GELU: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_real = columns < width
    begin_dependent(IS_DEPENDENT)
    at = row * 2 * width + columns
    gate = tl.zeros((BLOCK,), dtype=tl.float32)
    up = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        part = partials + split * split_stride + at
        gate += tl.load(part, mask=is_real, other=0.0).to(tl.float32)
        up += tl.load(part + width, mask=is_real, other=0.0).to(tl.float32)
    activated = bent(gate, IS_GELU).to(out.dtype.element_ty).to(tl.float32)
    result = (activated * up).to(out.dtype.element_ty)
    tl.store(out + row * width + columns, result, mask=is_real)


_gate_and_mul_kernel = triton.jit(_gate_and_mul)


def gate_and_mul(partials: torch.Tensor, dtype: torch.dtype, gate: Gate) -> torch.Tensor:
    """partials (splits, n, 2 * width), contiguous -> (n, width) of dtype.

    The gate's function of the sum's first half times its second (SwiGLU, GEGLU, Shazeer 2020).
    """
    num_splits, num_tokens, double_width = partials.shape
    width = double_width // 2
    out = torch.empty((num_tokens, width), dtype=dtype, device=partials.device)
    is_dependent = dependent_launch(partials)
    _gate_and_mul_kernel[(num_tokens, triton.cdiv(width, _BLOCK))](
        partials,
        out,
        num_tokens * double_width,
        width,
        NUM_SPLITS=num_splits,
        IS_GELU=gate == "gelu_tanh",
        BLOCK=_BLOCK,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return out
