"""A Triton GEMM for few tokens over FP8 weights: a byte of weights is read once, as it lies.

Elements become the input's dtype in registers, exactly; sums are float32, and the scales come
behind them: a row's at the end, a block's behind each of its products. Knows no layer.
"""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch, prefetch_lines
from workers.layers.gemm.configs import block_tokens
from workers.layers.kept.fp8 import BLOCK
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.skinny_shape import SkinnyShape

_SCALE_BLOCK = tl.constexpr(BLOCK)
_LINE = tl.constexpr(128)
_PREFETCHED_LINES = 4


def _fp8_skinny(  # noqa: PLR0913
    x: tl.tensor,
    weight: tl.tensor,
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
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(1)
    safe_rows = tl.minimum(rows, out_features - 1).to(tl.int64)
    first_k = split * k_per_split
    row_starts = weight + safe_rows[:, None] * in_features + first_k
    if IS_DEPENDENT:
        lines = tl.arange(0, NUM_LINES) * _LINE
        prefetch_lines((row_starts + lines[None, :]).to(tl.int64))
    begin_dependent(IS_DEPENDENT)
    tokens = tl.arange(0, BLOCK_TOKENS)
    is_token = tokens[:, None] < num_tokens
    ks = tl.arange(0, BLOCK_K)
    weights = row_starts + ks[None, :]
    inputs_at = x + tokens[:, None] * in_features + (first_k + ks)[None, :]
    total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
    block_scales = scales + safe_rows // _SCALE_BLOCK * (in_features // _SCALE_BLOCK)
    for start in range(0, k_per_split, BLOCK_K):
        tile = tl.load(weights + start).to(x.dtype.element_ty)
        inputs = tl.trans(tl.load(inputs_at + start, mask=is_token, other=0.0))
        if BY_BLOCK:
            scale = tl.load(block_scales + (first_k + start) // _SCALE_BLOCK)
            total += tl.dot(tile, inputs) * scale[:, None]
        else:
            total = tl.dot(tile, inputs, total)
    if not BY_BLOCK:
        total *= tl.load(scales + safe_rows)[:, None]
    target = out + (split * num_tokens + tokens[:, None]).to(tl.int64) * out_features
    is_real = is_token & (rows[None, :] < out_features)
    tl.store(target + rows[None, :], tl.trans(total).to(out.dtype.element_ty), mask=is_real)


_fp8_skinny_kernel = triton.jit(_fp8_skinny, do_not_specialize=("num_tokens",))


def fp8_skinny(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    shape: SkinnyShape,
    new: NewTensor = torch.empty,
) -> torch.Tensor:
    """x (n, in_features) @ weight.T -> (shape.num_splits, n, out_features), n small enough for one
    tile.

    weight float8_e4m3fn (out_features, in_features); scales float32, (out_features,) of rows or
    (out_features / 128, in_features / 128) of blocks. All contiguous. One split has x's dtype,
    several are float32: their sum is the product.
    """
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    out_dtype = x.dtype if shape.num_splits == 1 else torch.float32
    out = new((shape.num_splits, num_tokens, out_features), dtype=out_dtype, device=x.device)
    is_dependent = dependent_launch(x)
    k_per_split = in_features // shape.num_splits
    _fp8_skinny_kernel[(triton.cdiv(out_features, shape.block_rows), shape.num_splits)](
        x,
        weight,
        scales,
        out,
        num_tokens,
        out_features,
        in_features,
        k_per_split,
        BY_BLOCK=scales.dim() == 2,
        BLOCK_TOKENS=block_tokens(num_tokens),
        BLOCK_ROWS=shape.block_rows,
        BLOCK_K=shape.block_k,
        NUM_LINES=_PREFETCHED_LINES if k_per_split >= _PREFETCHED_LINES * BLOCK else 1,
        IS_DEPENDENT=is_dependent,
        num_stages=shape.num_stages,
        num_warps=shape.num_warps,
        launch_pdl=is_dependent,
    )
    return out
