"""Products with four-bit weights: of few rows as they are packed, of many with a matrix made for
the one product."""

import torch

from workers.layers.gemm.build import cublas_gemm
from workers.layers.kept.int4 import Int4Groups
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.int4_skinny import int4_skinny
from workers.layers.quantised.int4_spread import int4_spread
from workers.layers.quantised.product import KeptProduct
from workers.layers.quantised.skinny_shape import SkinnyShape

MAX_SKINNY_ROWS = 64
"""Not measured yet: benchmarks/h200/quantised_products.py shows both ways beside each other."""


class Int4Product(KeptProduct):
    """can_split: whether whoever reads the product sums up partial ones. The matrix of many rows is
    memory for as long as they are multiplied."""

    def __init__(self, kept: Int4Groups, can_split: bool) -> None:
        self.in_features = kept.in_features
        self._kept = kept
        self._shape = SkinnyShape.of(kept.out_features, kept.in_features, kept.turn, can_split)

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        kept = self._kept
        ordered = x if kept.order is None else x.index_select(1, kept.order)
        if x.shape[0] <= MAX_SKINNY_ROWS:
            return int4_skinny(ordered, kept, self._shape, new)
        return cublas_gemm(ordered, int4_spread(kept, x.dtype), new)
