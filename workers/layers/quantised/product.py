"""What the products with kept weights have in common."""

from abc import ABC, abstractmethod

import torch

from workers.layers.cuda.activation import gate_and_mul
from workers.layers.gate import Gate
from workers.layers.kept.weight import KeptWeight
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.skinny_shape import SkinnyShape, SkinnyTiles
from workers.layers.quantised.tile_table import TileTable, tiles_for


class KeptProduct(ABC):
    """PartialProducts of a weight as it is kept: x (n, in_features), contiguous, of a dtype that
    the weight names.

    can_split: whether whoever reads the product sums up partial ones. table: tiles by the number of
    rows and the weight's size; gated_table: of a weight that is a gate's rows over an up
    projection's. turn: input features that the kernel for few rows takes at least at once.
    """

    def __init__(
        self,
        kept: KeptWeight,
        can_split: bool,
        table: TileTable,
        gated_table: TileTable,
        turn: int,
    ) -> None:
        self.in_features = kept.in_features
        self._out_features = kept.out_features
        self._can_split, self._turn = can_split, turn
        self._table, self._gated_table = table, gated_table

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.into(torch.empty, x)

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        """(parts, n, out_features), whose sum over parts is the product, in a tensor that new
        makes. One part has x's dtype, several are float32."""
        tiles = tiles_for(self._table, x.shape[0], self._out_features)
        if tiles is None:
            return self._of_many(new, x)
        return self._of_few(new, x, tiles, self._shape(tiles, x.shape[0], self._can_split))

    def gated(self, x: torch.Tensor, gate: Gate) -> torch.Tensor:
        """gate(x @ gate.T) * (x @ up.T) -> (n, width), the weight being gate over up: by one kernel
        where the table has tiles for it."""
        tiles = tiles_for(self._gated_table, x.shape[0], self._out_features)
        if tiles is None:
            return gate_and_mul(self(x), x.dtype, gate)
        return self._gated_of_few(x, self._shape(tiles, x.shape[0], can_split=False), gate)[0]

    def _shape(self, tiles: SkinnyTiles, num_rows: int, can_split: bool) -> SkinnyShape:
        return tiles.of(self._out_features, self.in_features, self._turn, num_rows, can_split)

    @abstractmethod
    def _of_few(
        self, new: NewTensor, x: torch.Tensor, tiles: SkinnyTiles, shape: SkinnyShape
    ) -> torch.Tensor:
        """By the kernel that reads the weight as it is kept, in the tiles, which are of shape."""

    @abstractmethod
    def _gated_of_few(self, x: torch.Tensor, shape: SkinnyShape, gate: Gate) -> torch.Tensor:
        """(1, n, width), of tiles of the gated table."""

    @abstractmethod
    def _of_many(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        """By a library's product, of one part."""


class KeptGatedProduct:
    """gate(x @ gate.T) * (x @ up.T) -> (n, width), the product's weight being gate over up."""

    def __init__(self, product: KeptProduct, gate: Gate) -> None:
        self.product, self._gate = product, gate

    @property
    def in_features(self) -> int:
        return self.product.in_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.product.gated(x, self._gate)
