"""fp8_rounded.py's product with tiles that come by tensor maps, x's and the weights'.

One thread asks for a tile, so that none has copies of its own on their way where it fences what it
rounded. Rows and tokens beyond the last are zeros. Needs sm90. Knows no layer.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from workers.layers.cuda.launch import begin_dependent, dependent_launch, prefetch_lines
from workers.layers.gemm.configs import block_tokens
from workers.layers.kept.fp8 import BLOCK
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.fp8_rounded import scales_by_block
from workers.layers.quantised.fp8_rounding import to_fp8_by_powers
from workers.layers.quantised.skinny_shape import SkinnyShape
from workers.layers.quantised.tiles import store_parts

_SCALE_BLOCK = tl.constexpr(BLOCK)
_LINE_BYTES = tl.constexpr(128)
_PREFETCHED_LINES = 4


def _fp8_mapped(  # noqa: PLR0913
    x_map: tl.tensor,
    values_map: tl.tensor,
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
    first_row = tl.program_id(0) * BLOCK_ROWS
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    safe_rows = tl.minimum(rows, out_features - 1).to(tl.int64)
    first_k = split * k_per_split
    if IS_DEPENDENT:
        row_starts = values + (safe_rows[:, None] * in_features + first_k)
        lines = tl.arange(0, NUM_LINES) * _LINE_BYTES
        prefetch_lines((row_starts + lines[None, :]).to(tl.int64))
    begin_dependent(IS_DEPENDENT)
    first_token = tl.program_id(2) * BLOCK_TOKENS
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
    blocks_a_row = in_features // _SCALE_BLOCK
    # All rows of a program are of one row of blocks.
    block_scales = scales + first_row // _SCALE_BLOCK * blocks_a_row
    if BY_BLOCK:
        scale = tl.load(block_scales + first_k // _SCALE_BLOCK)
    for start in range(0, k_per_split, BLOCK_K):
        tile = values_map.load([first_row, first_k + start])
        inputs = x_map.load([first_token, first_k + start])
        rounded, x_scale = to_fp8_by_powers(inputs.to(tl.float32), values.dtype.element_ty)
        if BY_BLOCK:
            # The next turn's, so that no turn waits for it.
            following = (first_k + start + BLOCK_K) // _SCALE_BLOCK
            next_scale = tl.load(block_scales + tl.minimum(following, blocks_a_row - 1))
            x_scale *= scale
            scale = next_scale
        total += tl.dot(tile, rounded.T) * x_scale[None, :]
    if not BY_BLOCK:
        total *= tl.load(scales + safe_rows)[:, None]
    tokens = first_token + tl.arange(0, BLOCK_TOKENS)
    store_parts(out, total, split, tokens, rows, num_tokens, out_features)


_fp8_mapped_kernel = triton.jit(_fp8_mapped, do_not_specialize=("num_tokens",))


def fp8_mapped(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    shape: SkinnyShape,
    new: NewTensor = torch.empty,
) -> torch.Tensor:
    """As fp8_rounded; x and weight begin at multiples of 16 bytes."""
    by_block = scales_by_block(scales, shape)
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    out_dtype = x.dtype if shape.num_splits == 1 else torch.float32
    out = new((shape.num_splits, num_tokens, out_features), dtype=out_dtype, device=x.device)
    is_dependent = dependent_launch(x)
    k_per_split = in_features // shape.num_splits
    tokens = min(block_tokens(num_tokens), shape.block_tokens)
    num_blocks = triton.cdiv(out_features, shape.block_rows)
    _fp8_mapped_kernel[(num_blocks, shape.num_splits, triton.cdiv(num_tokens, tokens))](
        TensorDescriptor.from_tensor(x, [tokens, shape.block_k]),
        TensorDescriptor.from_tensor(weight, [shape.block_rows, shape.block_k]),
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
