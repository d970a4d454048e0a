"""FP8 weights times one row of x, by dot products on CUDA cores: x stays as it is.

A weight becomes float16, which has all that E4M3 has, and then float32, in which products add up: a
row's scale comes behind its sum, a block's behind each product. Knows no layer.
"""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch, prefetch_lines
from workers.layers.gate import Gate
from workers.layers.kept.fp8 import BLOCK
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.gemv import new_output, store_rows, weight_rows
from workers.layers.quantised.skinny_shape import SkinnyShape

_SCALE_BLOCK = tl.constexpr(BLOCK)


def _fp8_gemv(  # noqa: PLR0913
    x: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    out: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    k_per_split: tl.tensor,
    BY_BLOCK: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    STAGES: tl.constexpr,  # noqa: N803
    IS_GATED: tl.constexpr,  # noqa: N803
    IS_GELU: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (block of rows, split)."""
    rows = weight_rows(out_features, BLOCK_ROWS, IS_GATED)
    split = tl.program_id(1)
    first_k = split * k_per_split
    row_starts = values + (rows * in_features + first_k)
    if IS_DEPENDENT:
        prefetch_lines(row_starts.to(tl.int64))
    if not BY_BLOCK:
        row_scales = tl.load(scales + rows)
    begin_dependent(IS_DEPENDENT)
    columns = tl.arange(0, BLOCK_K)
    values_at = row_starts[:, None] + columns[None, :]
    inputs_at = x + first_k + columns
    scale_rows = rows // _SCALE_BLOCK * (in_features // _SCALE_BLOCK) + first_k // _SCALE_BLOCK
    sums = tl.zeros((BLOCK_ROWS, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, k_per_split, BLOCK_K, num_stages=STAGES):
        tile = tl.load(values_at + start, eviction_policy="evict_first")
        inputs = tl.load(inputs_at + start).to(tl.float32)[None, :]
        products = tile.to(tl.float16).to(tl.float32) * inputs
        if BY_BLOCK:
            BLOCKS: tl.constexpr = BLOCK_K // _SCALE_BLOCK  # noqa: N806
            places = start // _SCALE_BLOCK + tl.arange(0, BLOCKS)
            block_scales = tl.load(scales + scale_rows[:, None] + places[None, :])
            spread = tl.broadcast_to(block_scales[:, :, None], (BLOCK_ROWS, BLOCKS, _SCALE_BLOCK))
            products *= tl.reshape(spread, (BLOCK_ROWS, BLOCK_K))
        sums += products
    total = tl.sum(sums, axis=1)
    if not BY_BLOCK:
        total *= row_scales
    store_rows(out, total, tl.program_id(0), split, out_features, BLOCK_ROWS, IS_GATED, IS_GELU)


_fp8_gemv_kernel = triton.jit(_fp8_gemv)


def fp8_gemv(
    x: torch.Tensor,
    weight: torch.Tensor,
    scales: torch.Tensor,
    shape: SkinnyShape,
    new: NewTensor = torch.empty,
    gate: Gate | None = None,
) -> torch.Tensor:
    """x (1, in_features) @ weight.T -> (shape.num_splits, 1, out_features); with a gate the
    activation, (1, 1, out_features / 2), of a weight that is gate over up.

    weight float8_e4m3fn (out_features, in_features); scales float32, (out_features,) of rows or
    (out_features / 128, in_features / 128) of blocks. All contiguous. One split has x's dtype,
    several are float32: their sum is the product. Raises ValueError as new_output does, and where
    shape.block_k has no whole blocks.
    """
    by_block = scales.dim() == 2
    if by_block and shape.block_k % BLOCK:
        raise ValueError(f"{shape.block_k} columns of a turn are no whole blocks of {BLOCK}")
    num_rows, in_features = weight.shape
    out = new_output(x, num_rows, shape, gate, new)
    is_dependent = dependent_launch(x)
    k_per_split = in_features // shape.num_splits
    _fp8_gemv_kernel[(triton.cdiv(num_rows, shape.block_rows), shape.num_splits)](
        x,
        weight,
        scales,
        out,
        out.shape[2],
        in_features,
        k_per_split,
        BY_BLOCK=by_block,
        BLOCK_ROWS=shape.block_rows,
        BLOCK_K=shape.block_k,
        STAGES=shape.num_stages,
        IS_GATED=gate is not None,
        IS_GELU=gate == "gelu_tanh",
        IS_DEPENDENT=is_dependent,
        num_warps=shape.num_warps,
        launch_pdl=is_dependent,
    )
    return out
