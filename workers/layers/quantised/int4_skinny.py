"""A Triton GEMM over packed four-bit weights for up to a tile of rows.

A turn is 128 or 256 columns: eight products, one of each shift's values with its columns of x. Each
half of them is of one group, and what they add up to is multiplied by its scale in float32. Knows
no layer.
"""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch, prefetch_lines
from workers.layers.gemm.configs import block_tokens
from workers.layers.kept.int4 import VALUES_PER_WORD, Int4Groups
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.int4_values import int4_values
from workers.layers.quantised.skinny_shape import SkinnyShape

_SHIFTS = tl.constexpr(VALUES_PER_WORD)


def _int4_skinny(  # noqa: PLR0913
    x: tl.tensor,
    words: tl.tensor,
    scales: tl.tensor,
    zeros: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    k_per_split: tl.tensor,
    GROUP_SIZE: tl.constexpr,  # noqa: N803
    TURN: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    WORDS: tl.constexpr = TURN // _SHIFTS  # noqa: N806
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    safe_rows = tl.minimum(rows, out_features - 1).to(tl.int64)
    first_k = split * k_per_split
    row_starts = words + (safe_rows * in_features + first_k) // _SHIFTS
    if IS_DEPENDENT:
        prefetch_lines(row_starts.to(tl.int64))
    begin_dependent(IS_DEPENDENT)
    tokens = tl.arange(0, BLOCK_TOKENS)
    is_token = tokens[:, None] < num_tokens
    lanes = tl.arange(0, WORDS)
    words_at = row_starts[:, None] + lanes[None, :]
    inputs_at = x + tokens[:, None] * in_features + (first_k + lanes)[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
    for start in range(0, k_per_split, TURN):
        packed = tl.load(words_at + start // _SHIFTS)
        low_at = (first_k + start) // GROUP_SIZE * out_features + safe_rows
        high_at = (first_k + start + TURN // 2) // GROUP_SIZE * out_features + safe_rows
        low_zeros = tl.load(zeros + low_at).to(tl.int32)
        high_zeros = tl.load(zeros + high_at).to(tl.int32)
        values = int4_values(packed, low_zeros, high_zeros, x.dtype.element_ty, IS_PACKED)
        low = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
        high = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
        for shift in tl.static_range(_SHIFTS):
            inputs_here = inputs_at + start + shift * WORDS
            inputs = tl.trans(tl.load(inputs_here, mask=is_token, other=0.0))
            if shift < _SHIFTS // 2:
                low = tl.dot(values[shift], inputs, low)
            else:
                high = tl.dot(values[shift], inputs, high)
        total += low * tl.load(scales + low_at).to(tl.float32)[:, None]
        total += high * tl.load(scales + high_at).to(tl.float32)[:, None]
    target = out + (split * num_tokens + tokens[:, None]).to(tl.int64) * out_features
    is_real = is_token & (rows[None, :] < out_features)
    tl.store(target + rows[None, :], tl.trans(total).to(out.dtype.element_ty), mask=is_real)


_int4_skinny_kernel = triton.jit(_int4_skinny, do_not_specialize=("num_tokens",))


def int4_skinny(
    x: torch.Tensor, kept: Int4Groups, shape: SkinnyShape, new: NewTensor = torch.empty
) -> torch.Tensor:
    """x (n, in_features), its columns as kept has them, contiguous -> (shape.num_splits, n,
    out_features), n small enough for one tile. One split has x's dtype, several are float32: their
    sum is the product. shape.block_k: kept.turn."""
    num_tokens, in_features = x.shape
    out_dtype = x.dtype if shape.num_splits == 1 else torch.float32
    size = (shape.num_splits, num_tokens, kept.out_features)
    out = new(size, dtype=out_dtype, device=x.device)
    is_dependent = dependent_launch(x)
    _int4_skinny_kernel[(triton.cdiv(kept.out_features, shape.block_rows), shape.num_splits)](
        x,
        kept.words,
        kept.scales,
        kept.zeros,
        out,
        num_tokens,
        kept.out_features,
        in_features,
        in_features // shape.num_splits,
        GROUP_SIZE=kept.group_size,
        TURN=kept.turn,
        BLOCK_TOKENS=block_tokens(num_tokens),
        BLOCK_ROWS=shape.block_rows,
        IS_PACKED=x.is_cuda,
        IS_DEPENDENT=is_dependent,
        num_stages=shape.num_stages,
        num_warps=shape.num_warps,
        launch_pdl=is_dependent,
    )
    return out
