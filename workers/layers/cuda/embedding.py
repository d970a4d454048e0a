"""Embedding lookup in a rank's share of the vocabulary. Knows no other rank."""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import next_power_of_2

_ELEMENTS_PER_WARP = 512
_MAX_WARPS = 8


def _lookup(
    input_ids: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    first_row: tl.tensor,
    num_rows: tl.tensor,
    hidden_size: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """One token a program."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    local = tl.load(input_ids + token) - first_row
    is_here = (local >= 0) & (local < num_rows)
    row = tl.where(is_here, local, 0)
    is_real = columns < hidden_size
    values = tl.load(weight + row * hidden_size + columns, mask=is_real & is_here, other=0.0)
    tl.store(out + token * hidden_size + columns, values, mask=is_real)


_lookup_kernel = triton.jit(_lookup, do_not_specialize=("first_row", "num_rows"))


def lookup(
    input_ids: torch.Tensor, weight: torch.Tensor, first_row: int, out: torch.Tensor
) -> None:
    """out (n, hidden_size) = rows of weight for input_ids int64 (n,), zeros for ids outside of
    [first_row, first_row + num_rows), weight being (num_rows, hidden_size).

    An ordinary launch: it waits for all that runs before it.
    """
    num_rows, hidden_size = weight.shape
    block = next_power_of_2(hidden_size)
    _lookup_kernel[(input_ids.shape[0],)](
        input_ids,
        weight,
        out,
        first_row,
        num_rows,
        hidden_size,
        BLOCK=block,
        num_warps=min(_MAX_WARPS, max(1, block // _ELEMENTS_PER_WARP)),
    )
