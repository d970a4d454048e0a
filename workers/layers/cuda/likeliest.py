"""The likeliest token of each row of logits, by its column or its name: in one launch."""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch, next_power_of_2

_MAX_BLOCK = 1 << 15
_NUM_WARPS = 16
_LOWEST = tl.constexpr(-(1 << 31))
_HIGHEST = tl.constexpr((1 << 31) - 1)


def _likeliest(
    logits: tl.tensor,
    names: tl.tensor,
    out: tl.tensor,
    row_stride: tl.tensor,
    num_tokens: tl.tensor,
    HAS_NAMES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """One row a program. Bits of a float32 that is not negative are in its order, those of a
    negative one in the opposite order; what is no number stands above all, as for torch.argmax."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    best = tl.full((), _LOWEST, tl.int32)
    token = tl.full((), 0, tl.int32)
    begin_dependent(IS_DEPENDENT)
    for start in range(0, num_tokens, BLOCK):
        at = start + columns
        is_real = at < num_tokens
        values = tl.load(logits + row * row_stride + at, mask=is_real, other=0.0).to(tl.float32)
        # Both zeros are the same number.
        bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
        order = tl.where(bits < 0, bits ^ _HIGHEST, bits)
        order = tl.where(values != values, _HIGHEST, order)
        order = tl.where(is_real, order, _LOWEST)
        largest = tl.max(order, axis=0)
        first = tl.min(tl.where(order == largest, at, num_tokens), axis=0)
        token = tl.where(largest > best, first, token)
        best = tl.maximum(best, largest)
    if HAS_NAMES:
        tl.store(out + row, tl.load(names + token))
    else:
        tl.store(out + row, token.to(tl.int64))


_likeliest_kernel = triton.jit(_likeliest)


def likeliest_columns(logits: torch.Tensor) -> torch.Tensor:
    """logits (n, num_tokens), each row contiguous -> int64 (n,), columns as of torch.argmax:
    the lowest of equals, the lowest NaN where there is one."""
    return _launch(logits, None)


def likeliest_named(logits: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
    """names[likeliest_columns(logits)]. names: int64 (num_tokens,)."""
    return _launch(logits, names)


def _launch(logits: torch.Tensor, names: torch.Tensor | None) -> torch.Tensor:
    num_rows, num_tokens = logits.shape
    out = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    is_dependent = dependent_launch(logits)
    _likeliest_kernel[(num_rows,)](
        logits,
        out if names is None else names,
        out,
        logits.stride(0),
        num_tokens,
        HAS_NAMES=names is not None,
        BLOCK=min(_MAX_BLOCK, next_power_of_2(num_tokens)),
        IS_DEPENDENT=is_dependent,
        num_warps=_NUM_WARPS,
        launch_pdl=is_dependent,
    )
    return out
