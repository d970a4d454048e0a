"""Products with four-bit weights: as they are packed, or of many rows with a matrix made for the
one product."""

import torch

from workers.layers.gate import Gate
from workers.layers.gemm.build import cublas_gemm
from workers.layers.kept.int4 import Int4Groups
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised import tile_table
from workers.layers.quantised.int4_mma import ALIGNMENT_BYTES, int4_mma
from workers.layers.quantised.int4_skinny import int4_skinny
from workers.layers.quantised.int4_spread import int4_spread
from workers.layers.quantised.product import KeptProduct
from workers.layers.quantised.skinny_shape import GemvTiles, SkinnyShape, SkinnyTiles


class Int4Product(KeptProduct):
    """The matrix of many rows is memory for as long as they are multiplied."""

    def __init__(
        self,
        kept: Int4Groups,
        can_split: bool,
        table: tile_table.TileTable = tile_table.INT4,
        gated_table: tile_table.TileTable = tile_table.INT4_GATED,
    ) -> None:
        super().__init__(kept, can_split, table, gated_table, kept.turn)
        self._kept = kept

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        return super().into(new, self._ordered(x))

    def _ordered(self, x: torch.Tensor) -> torch.Tensor:
        order = self._kept.order
        return x if order is None else x.index_select(1, order)

    def _of_few(
        self, new: NewTensor, x: torch.Tensor, tiles: SkinnyTiles, shape: SkinnyShape
    ) -> torch.Tensor:
        if isinstance(tiles, GemvTiles):
            return int4_mma(_aligned(x), self._kept, shape, new)
        return int4_skinny(x, self._kept, shape, new)

    def _gated_of_few(self, x: torch.Tensor, shape: SkinnyShape, gate: Gate) -> torch.Tensor:
        return int4_mma(_aligned(self._ordered(x)), self._kept, shape, gate=gate)

    def _of_many(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        return cublas_gemm(x, int4_spread(self._kept, x.dtype), new)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, or a copy where it does not begin as int4_mma asks: any part of a wider row is contiguous
    as long as it is the only row."""
    if x.data_ptr() % ALIGNMENT_BYTES == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)
