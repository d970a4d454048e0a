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
from workers.layers.quantised.int4_stream_row import UndividedRow, from_stream, into_stream
from workers.layers.quantised.product import KeptProduct
from workers.layers.quantised.skinny_shape import GemvTiles, MmaTiles, SkinnyShape, SkinnyTiles
from workers.layers.quantised.tile_table import rule_for, tiles_for


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

    def into_stream(
        self, x: torch.Tensor, residual: torch.Tensor, norm_weight: torch.Tensor
    ) -> UndividedRow:
        """Of one row, as int4_stream_row.py. stream_shape(is_gated=False) must be there."""
        shape = self.stream_shape(is_gated=False)
        assert shape is not None
        return into_stream(_aligned(self._ordered(x)), self._kept, shape, residual, norm_weight)

    def gated_from_stream(self, row: UndividedRow, eps: float, gate: Gate) -> torch.Tensor:
        """(1, width), of the row that the norm would leave. stream_shape(is_gated=True) must be
        there."""
        shape = self.stream_shape(is_gated=True)
        assert shape is not None
        values = _aligned(self._ordered(row.values))
        return from_stream(UndividedRow(values, row.squares), self._kept, shape, eps, gate)

    @property
    def folds_norm(self) -> bool:
        """Whether the table asks for gated_from_stream."""
        return rule_for(self._gated_table, 1, self._out_features).folds_norm

    def stream_shape(self, *, is_gated: bool) -> SkinnyShape | None:
        """Of one row, or None where the table's kernel is not one that int4_stream_row.py has."""
        tiles = tiles_for(self._gated_table if is_gated else self._table, 1, self._out_features)
        if not isinstance(tiles, MmaTiles):
            return None
        shape = self._shape(tiles, 1, self._can_split and not is_gated)
        is_whole = is_gated or self._out_features % shape.block_rows == 0
        return shape if is_whole and shape.num_splits == 1 else None

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
