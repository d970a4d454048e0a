"""Two rows of one size from wherever they lie, each by a norm of its own, side by side: in one
launch."""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch, next_power_of_2

_ELEMENTS_PER_WARP = 512
_MAX_WARPS = 16


def _pair_norm(  # noqa: PLR0913
    first: tl.tensor,
    second: tl.tensor,
    first_rows: tl.tensor,
    second_rows: tl.tensor,
    first_weight: tl.tensor,
    second_weight: tl.tensor,
    out: tl.tensor,
    hidden_size: tl.tensor,
    eps: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
    FIRST_HAS_ROWS: tl.constexpr,  # noqa: N803
    SECOND_HAS_ROWS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """A program: a row of first or of second."""
    row = tl.program_id(0).to(tl.int64)
    half = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    is_real = columns < hidden_size
    x, weight = first, first_weight
    if half == 1:
        x, weight = second, second_weight
    scale = tl.load(weight + columns, mask=is_real, other=0.0).to(tl.float32)
    begin_dependent(IS_DEPENDENT)
    source = row
    if half == 0:
        if FIRST_HAS_ROWS:
            source = tl.load(first_rows + row).to(tl.int64)
    elif SECOND_HAS_ROWS:
        source = tl.load(second_rows + row).to(tl.int64)
    values = tl.load(x + source * hidden_size + columns, mask=is_real, other=0.0).to(tl.float32)
    inverse_rms = tl.rsqrt(tl.sum(values * values, axis=0) / hidden_size + eps)
    normed = (values * inverse_rms).to(out.dtype.element_ty).to(tl.float32)
    at = (2 * row + half) * hidden_size + columns
    tl.store(out + at, (normed * scale).to(out.dtype.element_ty), mask=is_real)


_pair_norm_kernel = triton.jit(_pair_norm)


def pair_norm(
    first: torch.Tensor,
    second: torch.Tensor,
    weights: tuple[torch.Tensor, torch.Tensor],
    eps: float,
    first_rows: torch.Tensor | None = None,
    second_rows: torch.Tensor | None = None,
    may_depend: bool = True,
) -> torch.Tensor:
    """first, second (n, hidden_size) -> their RMSNorms, (n, 2 * hidden_size), in a new tensor.

    first_rows, second_rows: which rows of first or of second these are, where it has others, int32
    or int64 (n,); they are not checked. weights: of first and of second, (hidden_size,) each; they
    scale what was rounded, as Llama's norms do. All others contiguous and of one dtype. may_depend:
    whether it may start while what runs before it ends; an ordinary launch waits for all of that.
    """
    hidden_size = first.shape[1]
    num_tokens = len(first if first_rows is None else first_rows)
    out = first.new_empty((num_tokens, 2 * hidden_size))
    block = next_power_of_2(hidden_size)
    is_dependent = may_depend and dependent_launch(first)
    _pair_norm_kernel[(num_tokens, 2)](
        first,
        second,
        first if first_rows is None else first_rows,
        second if second_rows is None else second_rows,
        *weights,
        out,
        hidden_size,
        eps,
        BLOCK=block,
        FIRST_HAS_ROWS=first_rows is not None,
        SECOND_HAS_ROWS=second_rows is not None,
        IS_DEPENDENT=is_dependent,
        num_warps=min(_MAX_WARPS, max(1, block // _ELEMENTS_PER_WARP)),
        launch_pdl=is_dependent,
    )
    return out
