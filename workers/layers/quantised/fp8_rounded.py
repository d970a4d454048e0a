"""A Triton GEMM for few tokens over FP8 weights that tensor cores take as they lie: x becomes FP8.

A turn's columns of x are rounded inside the kernel, by a power of two a token, so that weights go
from memory to the tensor cores without passing registers. A turn's product has what these keep of
sums of FP8, about 14 bits; products add up in float32. Scales come behind: x's and a block's behind
a turn's product, a row's at the end. Knows no layer.
"""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch, prefetch_lines
from workers.layers.gemm.configs import block_tokens
from workers.layers.kept.fp8 import BLOCK
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.fp8_rounding import to_fp8_by_powers
from workers.layers.quantised.skinny_shape import SkinnyShape
from workers.layers.quantised.tiles import store_parts

_SCALE_BLOCK = tl.constexpr(BLOCK)
_LINE_BYTES = tl.constexpr(128)
_PREFETCHED_LINES = 4


def _fp8_rounded(  # noqa: PLR0913
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    k_per_split: tl.tensor,
    BY_BLOCK: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    NUM_LINES: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (block of rows, split, block of tokens)."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    safe_rows = tl.minimum(rows, out_features - 1).to(tl.int64)
    first_k = split * k_per_split
    row_starts = values + (safe_rows[:, None] * in_features + first_k)
    if IS_DEPENDENT:
        lines = tl.arange(0, NUM_LINES) * _LINE_BYTES
        prefetch_lines((row_starts + lines[None, :]).to(tl.int64))
    begin_dependent(IS_DEPENDENT)
    tokens = tl.program_id(2) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    is_token = tokens[:, None] < num_tokens
    columns = tl.arange(0, BLOCK_K)[None, :]
    values_at = row_starts + columns
    inputs_at = x + tokens[:, None].to(tl.int64) * in_features + first_k + columns
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
    blocks_a_row = in_features // _SCALE_BLOCK
    # All rows of a program are of one row of blocks.
    block_scales = scales + tl.program_id(0) * BLOCK_ROWS // _SCALE_BLOCK * blocks_a_row
    if BY_BLOCK:
        scale = tl.load(block_scales + first_k // _SCALE_BLOCK)
    for start in range(0, k_per_split, BLOCK_K):
        tile = tl.load(values_at + start)
        inputs = tl.load(inputs_at + start, mask=is_token, other=0.0).to(tl.float32)
        rounded, x_scale = to_fp8_by_powers(inputs, values.dtype.element_ty)
        if BY_BLOCK:
            # The next turn's, so that no turn waits for it.
            following = (first_k + start + BLOCK_K) // _SCALE_BLOCK
            next_scale = tl.load(block_scales + tl.minimum(following, blocks_a_row - 1))
            x_scale *= scale
            scale = next_scale
        total += tl.dot(tile, rounded.T) * x_scale[None, :]
    if not BY_BLOCK:
        total *= tl.load(scales + safe_rows)[:, None]
    store_parts(out, total, split, tokens, rows, num_tokens, out_features)


_fp8_rounded_kernel = triton.jit(_fp8_rounded, do_not_specialize=("num_tokens",))


def scales_by_block(scales: torch.Tensor, shape: SkinnyShape) -> bool:
    """Whether scales are those of blocks, one of which all rows of a program and all columns of a
    turn have then. Raises ValueError where shape.block_rows or shape.block_k does not divide
    128."""
    by_block = scales.dim() == 2
    if by_block and BLOCK % shape.block_k:
        raise ValueError(f"{shape.block_k} columns of a turn are not of one block of {BLOCK}")
    if by_block and BLOCK % shape.block_rows:
        raise ValueError(f"{shape.block_rows} rows of a program are not of one block of {BLOCK}")
    return by_block


def fp8_rounded(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    shape: SkinnyShape,
    new: NewTensor = torch.empty,
) -> torch.Tensor:
    """x (n, in_features) @ weight.T -> (shape.num_splits, n, out_features), x rounded to E4M3 by a
    scale a token and shape.block_k columns.

    weight float8_e4m3fn (out_features, in_features); scales float32, (out_features,) of rows or
    (out_features / 128, in_features / 128) of blocks. All contiguous. One split has x's dtype,
    several are float32: their sum is the product. Raises ValueError as scales_by_block does.
    """
    by_block = scales_by_block(scales, shape)
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    out_dtype = x.dtype if shape.num_splits == 1 else torch.float32
    out = new((shape.num_splits, num_tokens, out_features), dtype=out_dtype, device=x.device)
    is_dependent = dependent_launch(x)
    k_per_split = in_features // shape.num_splits
    tokens = min(block_tokens(num_tokens), shape.block_tokens)
    num_blocks = triton.cdiv(out_features, shape.block_rows)
    _fp8_rounded_kernel[(num_blocks, shape.num_splits, triton.cdiv(num_tokens, tokens))](
        x,
        weight,
        scales,
        out,
        num_tokens,
        out_features,
        in_features,
        k_per_split,
        BY_BLOCK=by_block,
        BLOCK_TOKENS=tokens,
        BLOCK_ROWS=shape.block_rows,
        BLOCK_K=shape.block_k,
        NUM_LINES=_PREFETCHED_LINES if k_per_split >= _PREFETCHED_LINES * BLOCK else 1,
        IS_DEPENDENT=is_dependent,
        num_stages=shape.num_stages,
        num_warps=shape.num_warps,
        launch_pdl=is_dependent,
    )
    return out
