"""Products of modules that keep their weights and are called: parts are summed up in a launch where
nobody else does it.
"""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch
from workers.layers.kept.weight import KeptWeight
from workers.layers.quantised.product import KeptProduct
from workers.layers.quantised.products import kept_product

_BLOCK = 1024


def _sum_parts(
    partials: tl.tensor,
    out: tl.tensor,
    num_elements: tl.tensor,
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_real = at < num_elements
    begin_dependent(IS_DEPENDENT)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for split in tl.static_range(NUM_SPLITS):
        place = partials + split * num_elements.to(tl.int64) + at
        total += tl.load(place, mask=is_real, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=is_real)


_sum_parts_kernel = triton.jit(_sum_parts)


def sum_parts(partials: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """partials (splits, n, width), contiguous -> their sum over splits, (n, width) of dtype; it is
    taken in float32 and rounded once."""
    out = torch.empty(partials.shape[1:], dtype=dtype, device=partials.device)
    is_dependent = dependent_launch(partials)
    _sum_parts_kernel[(triton.cdiv(out.numel(), _BLOCK),)](
        partials,
        out,
        out.numel(),
        NUM_SPLITS=partials.shape[0],
        BLOCK=_BLOCK,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return out


class WholeProduct:
    """As KeptMultiply: x contiguous, the product of x's dtype; several parts are float32."""

    def __init__(self, product: KeptProduct) -> None:
        self.parts = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.parts(x)
        return parts[0] if parts.shape[0] == 1 else sum_parts(parts, x.dtype)


def whole_product(kept: KeptWeight) -> WholeProduct:
    """As LinearLayer.multiply_kept_by takes it."""
    return WholeProduct(kept_product(kept, can_split=True))
