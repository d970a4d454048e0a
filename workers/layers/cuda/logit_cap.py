"""The soft cap of a language-model head's logits, in one kernel over the logits as they lie."""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch

_BLOCK = 2048


def _cap_logits(
    logits: tl.tensor,
    row_stride: tl.tensor,
    width: tl.tensor,
    cap: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """A program: a row's next BLOCK columns. tanh(x) is 2 * sigmoid(2 * x) - 1; NaN stays NaN."""
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin_dependent(IS_DEPENDENT)
    at = logits + tl.program_id(0).to(tl.int64) * row_stride + columns
    values = tl.load(at, mask=columns < width, other=0.0).to(tl.float32)
    capped = cap * (2.0 * tl.sigmoid(2.0 * values / cap) - 1.0)
    tl.store(at, capped.to(logits.dtype.element_ty), mask=columns < width)


_cap_logits_kernel = triton.jit(_cap_logits)


def cap_logits_(logits: torch.Tensor, cap: float) -> torch.Tensor:
    """logits (n, width), its rows dense, become cap * tanh(logits / cap), in place (Gemma 2).

    Computed in float32 and rounded once.
    """
    num_rows, width = logits.shape
    if num_rows:
        is_dependent = dependent_launch(logits)
        _cap_logits_kernel[(num_rows, triton.cdiv(width, _BLOCK))](
            logits,
            logits.stride(0),
            width,
            cap,
            BLOCK=_BLOCK,
            IS_DEPENDENT=is_dependent,
            num_warps=4,
            launch_pdl=is_dependent,
        )
    return logits
