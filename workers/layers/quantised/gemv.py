"""What the kernels for one row of x have in common: which rows of a weight a program has, and what
becomes of their products.

A product's program has BLOCK_ROWS rows of the weight. So it has in a gated block, whose weight is a
gate's rows over an up projection's: there they are pairs, one of each, of BLOCK_ROWS / 2 output
features, whose products meet in registers. Knows no format.
"""

import torch
import triton
import triton.language as tl

from workers.layers.gate import Gate
from workers.layers.gemm.skinny import activate
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.skinny_shape import SkinnyShape


def _run_weight_rows(
    out_features: tl.tensor,
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    IS_GATED: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """int64 (BLOCK_ROWS,): rows of the weight; beyond the last, the last. out_features: of the
    result, of which a gated weight has twice as many rows."""
    places = tl.arange(0, BLOCK_ROWS)
    if IS_GATED:
        features = tl.program_id(0) * (BLOCK_ROWS // 2) + places // 2
        rows = tl.minimum(features, out_features - 1) + places % 2 * out_features
    else:
        rows = tl.minimum(tl.program_id(0) * BLOCK_ROWS + places, out_features - 1)
    return rows.to(tl.int64)


weight_rows = triton.jit(_run_weight_rows)


def _run_store_rows(
    out: tl.tensor,
    total: tl.tensor,
    block: tl.tensor,
    split: tl.tensor,
    out_features: tl.tensor,
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    IS_GATED: tl.constexpr,  # noqa: N803
    IS_GELU: tl.constexpr,  # noqa: N803
) -> None:
    """total float32 (BLOCK_ROWS,), of weight_rows' rows in program block, into out (splits,
    out_features); a gated block has one split."""
    dtype: tl.constexpr = out.dtype.element_ty
    if IS_GATED:
        features = block * (BLOCK_ROWS // 2) + tl.arange(0, BLOCK_ROWS // 2)
        gate, up = tl.split(tl.reshape(total, (BLOCK_ROWS // 2, 2)))
        activated = activate(gate, up, IS_GELU, dtype)
        tl.store(out + features, activated, mask=features < out_features)
    else:
        rows = block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        at = out + split * out_features + rows
        tl.store(at, total.to(dtype), mask=rows < out_features)


store_rows = triton.jit(_run_store_rows)


def new_output(
    x: torch.Tensor, weight_rows: int, shape: SkinnyShape, gate: Gate | None, new: NewTensor
) -> torch.Tensor:
    """(shape.num_splits, 1, output features): of x's dtype where it is one, else float32. Raises
    ValueError for more than one row of x, and for a gate over parts of sums."""
    if x.shape[0] != 1:
        raise ValueError(f"{x.shape[0]} rows of x, where one is multiplied")
    if gate is not None and shape.num_splits > 1:
        raise ValueError(f"a gate cannot bend {shape.num_splits} parts of its sums")
    dtype = x.dtype if shape.num_splits == 1 else torch.float32
    features = weight_rows if gate is None else weight_rows // 2
    return new((shape.num_splits, 1, features), dtype=dtype, device=x.device)
