"""What a drafter's pass over trees reads beside their tokens, gathered in one launch."""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.tree_levels import grow_level
from workers.layers.cuda.tree_paths import find_before, hold_paths
from workers.speculation.tree_kernels import TreeKernels

_BLOCK = 1024


def _carry_states(
    carried: tl.tensor,
    made: tl.tensor,
    parents: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    num_made: tl.tensor,
    size: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Program (token of all rows, part of its state)."""
    own = tl.program_id(0)
    row, token = own // num_tokens, own % num_tokens
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    num_of_root = tl.where(token == 0, size, 0)
    is_root, is_draft = at < num_of_root, at < size - num_of_root
    parent = row.to(tl.int64) * num_made + tl.load(parents + own)
    of_root = tl.load(carried + row.to(tl.int64) * size + at, mask=is_root, other=0.0)
    of_draft = tl.load(made + parent * size + at, mask=is_draft, other=0.0)
    state = tl.where(is_root, of_root, of_draft)
    tl.store(out + own.to(tl.int64) * size + at, state, mask=at < size)


_carry_states_kernel = triton.jit(
    _carry_states,
    do_not_specialize=("num_tokens", "num_made"),
    do_not_specialize_on_alignment=("carried", "parents"),
)


def carry_states(carried: torch.Tensor, made: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """workers.speculation.tree_kernels.CarryStates. All contiguous."""
    (n, num_tokens), size = parents.shape, carried.shape[1]
    out = carried.new_empty((n * num_tokens, size))
    if size:
        _carry_states_kernel[(n * num_tokens, triton.cdiv(size, _BLOCK))](
            carried,
            made,
            parents,
            out,
            num_tokens,
            made.shape[1],
            size,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return out


CUDA_TREE_KERNELS = TreeKernels(grow_level, carry_states, hold_paths, find_before)
