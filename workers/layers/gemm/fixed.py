"""One Triton GEMM for any number of tokens, whose sums know nothing of that number.

A tile of one size, its columns in one order, nothing left to a library's choice: what deterministic
mode holds other kernels against (invariant.py), and takes where none of them gives the same. Knows
no layer and makes no choice.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch
from workers.layers.new_tensor import NewTensor

_BLOCK_TOKENS = 64
_BLOCK_ROWS = 128
BLOCK_K = 64
_NUM_STAGES = 3
_NUM_WARPS = 4


def _fixed(  # noqa: PLR0913
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
    HAS_WHOLE_BLOCKS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (block of tokens, block of rows, split): neighbours read the same weights."""
    begin_dependent(IS_DEPENDENT)
    tokens = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(2)
    ks = tl.arange(0, BLOCK_K)
    first_k = split * k_per_split
    safe_rows = tl.minimum(rows, out_features - 1).to(tl.int64)
    safe_tokens = tl.minimum(tokens, num_tokens - 1).to(tl.int64)
    weights = weight + safe_rows[:, None] * in_features + (first_k + ks)[None, :]
    values = x + safe_tokens[:, None] * in_features + (first_k + ks)[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
    for start in range(0, k_per_split, BLOCK_K):
        if HAS_WHOLE_BLOCKS:
            tile = tl.load(weights + start)
            inputs = tl.load(values + start)
        else:
            is_column = (ks < k_per_split - start)[None, :]
            tile = tl.load(weights + start, mask=is_column, other=0.0)
            inputs = tl.load(values + start, mask=is_column, other=0.0)
        total = tl.dot(tile, tl.trans(inputs), total)
    at = out + (split.to(tl.int64) * num_tokens + safe_tokens[:, None]) * out_features
    is_real = (tokens < num_tokens)[:, None] & (rows < out_features)[None, :]
    tl.store(at + rows[None, :], tl.trans(total).to(out.dtype.element_ty), mask=is_real)


_fixed_kernel = triton.jit(_fixed, do_not_specialize=("num_tokens",))


@dataclass(frozen=True, slots=True)
class FixedGemm:
    """x (n, in_features), weight (out_features, in_features) -> the product's num_splits parts
    (num_splits, n, out_features), float32 where they are several, else of x's dtype.

    num_splits divides in_features. Both 16 bits wide and contiguous.
    """

    num_splits: int

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, new: NewTensor = torch.empty
    ) -> torch.Tensor:
        num_tokens, in_features = x.shape
        out_features = weight.shape[0]
        out_dtype = x.dtype if self.num_splits == 1 else torch.float32
        out = new((self.num_splits, num_tokens, out_features), dtype=out_dtype, device=x.device)
        is_dependent = dependent_launch(x)
        k_per_split = in_features // self.num_splits
        blocks = triton.cdiv(num_tokens, _BLOCK_TOKENS), triton.cdiv(out_features, _BLOCK_ROWS)
        _fixed_kernel[(*blocks, self.num_splits)](
            x,
            weight,
            out,
            num_tokens,
            out_features,
            in_features,
            k_per_split,
            BLOCK_TOKENS=_BLOCK_TOKENS,
            BLOCK_ROWS=_BLOCK_ROWS,
            BLOCK_K=BLOCK_K,
            HAS_WHOLE_BLOCKS=k_per_split % BLOCK_K == 0,
            IS_DEPENDENT=is_dependent,
            num_stages=_NUM_STAGES,
            num_warps=_NUM_WARPS,
            launch_pdl=is_dependent,
        )
        return out
