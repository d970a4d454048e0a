"""A norm between two products that both its neighbours do a part of."""

from typing import Self

import torch

from workers.layers.gemm.matrix import PartialProducts
from workers.layers.norm import RMSNorm
from workers.layers.quantised.int4_products import Int4Product
from workers.layers.quantised.product import KeptGatedProduct


class FoldedNorm:
    """What an attention's output projection, the join with the stream behind it and the gated
    block's first products do, by two launches in place of three, of one row of bfloat16."""

    def __init__(self, o: Int4Product, norm: RMSNorm, gate_up: KeptGatedProduct) -> None:
        """gate_up: of an Int4Product. Both have stream_shape."""
        assert isinstance(gate_up.product, Int4Product)
        self._o, self._norm = o, norm
        self._gate_up, self._gate = gate_up.product, gate_up.gate

    @classmethod
    def of(cls, o: PartialProducts, norm: RMSNorm, gate_up: object) -> Self | None:
        """None where the products have no kernels for it, or the table does not ask for it. o: its
        sums are whole, of one rank."""
        if not (isinstance(o, Int4Product) and isinstance(gate_up, KeptGatedProduct)):
            return None
        first = gate_up.product
        if not isinstance(first, Int4Product) or not first.folds_norm:
            return None
        if o.stream_shape(is_gated=False) is None:
            return None
        return None if first.stream_shape(is_gated=True) is None else cls(o, norm, gate_up)

    def takes(self, attended: torch.Tensor) -> bool:
        return attended.shape[0] == 1 and attended.dtype == torch.bfloat16

    def __call__(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """attended (1, heads * v_head_dim); residual (1, hidden_size), in place -> (1, width)."""
        row = self._o.into_stream(attended, residual, self._norm.scale)
        return self._gate_up.gated_from_stream(row, self._norm.eps, self._gate)
