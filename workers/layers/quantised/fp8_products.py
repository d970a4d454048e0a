"""Products with FP8 weights: of few rows as they are, of more rounded by scales of their own.

One: dot products, x as it is. Few: where reading the weights takes longer than multiplying, x is
rounded inside the kernel. For more, tensor cores take both in FP8: cuBLASLt with a scale a row,
CUTLASS with scales of blocks.
"""

import importlib
from collections.abc import Callable, Mapping

import torch

from workers.errors import ConfigError
from workers.layers.gate import Gate
from workers.layers.kept.fp8 import BLOCK, Fp8Blocks, Fp8Rows
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised import tile_table
from workers.layers.quantised.fp8_gemv import fp8_gemv
from workers.layers.quantised.fp8_mapped import fp8_mapped
from workers.layers.quantised.fp8_rounded import fp8_rounded
from workers.layers.quantised.fp8_rounding import round_groups, round_rows
from workers.layers.quantised.product import KeptProduct
from workers.layers.quantised.skinny_shape import (
    GemvTiles,
    MappedSkinnyTiles,
    RoundedSkinnyTiles,
    SkinnyShape,
    SkinnyTiles,
)

_MIN_TURN = 32
"""Input features that the kernel for few rows takes at once: other sizes go the way of many."""

_Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, SkinnyShape, NewTensor], torch.Tensor]
_KERNELS: Mapping[type[SkinnyTiles], _Kernel] = {
    GemvTiles: fp8_gemv,
    RoundedSkinnyTiles: fp8_rounded,
    MappedSkinnyTiles: fp8_mapped,
}

BlockScaledMM = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.dtype], torch.Tensor
]
"""(a (m, k), b (k, n), scales of a (m, k / 128), of b (k / 128, n / 128), dtype) -> (m, n); a is
row by row, the others column by column."""


class Fp8RowProduct(KeptProduct):
    def __init__(
        self,
        kept: Fp8Rows,
        can_split: bool,
        table: tile_table.TileTable = tile_table.FP8_ROWS,
        gated_table: tile_table.TileTable = tile_table.FP8_GATED,
    ) -> None:
        turn = turn_of(kept.in_features)
        tables = (table, gated_table) if turn >= _MIN_TURN else ((), ())
        super().__init__(kept, can_split, *tables, turn)
        self._kept = kept

    def _of_few(
        self, new: NewTensor, x: torch.Tensor, tiles: SkinnyTiles, shape: SkinnyShape
    ) -> torch.Tensor:
        return _KERNELS[type(tiles)](x, self._kept.values, self._kept.scales, shape, new)

    def _gated_of_few(self, x: torch.Tensor, shape: SkinnyShape, gate: Gate) -> torch.Tensor:
        return fp8_gemv(x, self._kept.values, self._kept.scales, shape, gate=gate)

    def _of_many(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        kept, rounded = self._kept, round_rows(x)
        out = new((1, x.shape[0], kept.out_features), dtype=x.dtype, device=x.device)
        torch._scaled_mm(
            rounded.values,
            kept.values.t(),
            rounded.scales,
            kept.scales.unsqueeze(0),
            out_dtype=x.dtype,
            use_fast_accum=True,
            out=out[0],
        )
        return out


class Fp8BlockProduct(KeptProduct):
    """Raises ConfigError where sglang-kernel is missing.

    Its CUTLASS kernel shares input features out among programs where these are more than three
    times the output features, and adds their sums in the order in which they are ready: there one
    product is not always the same, bit for bit, as the next one of the same input.
    """

    def __init__(
        self,
        kept: Fp8Blocks,
        can_split: bool,
        table: tile_table.TileTable = tile_table.FP8_BLOCKS,
        gated_table: tile_table.TileTable = tile_table.FP8_GATED,
    ) -> None:
        super().__init__(kept, can_split, table, gated_table, BLOCK)
        self._kept = kept
        self._multiply = load_block_scaled_mm()

    def _of_few(
        self, new: NewTensor, x: torch.Tensor, tiles: SkinnyTiles, shape: SkinnyShape
    ) -> torch.Tensor:
        return _KERNELS[type(tiles)](x, self._kept.values, self._kept.scales, shape, new)

    def _gated_of_few(self, x: torch.Tensor, shape: SkinnyShape, gate: Gate) -> torch.Tensor:
        return fp8_gemv(x, self._kept.values, self._kept.scales, shape, gate=gate)

    def _of_many(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        kept, rounded = self._kept, round_groups(x)
        product = self._multiply(
            rounded.values, kept.values.t(), rounded.scales, kept.scales.t(), x.dtype
        )[: x.shape[0]]
        if new is torch.empty:
            return product.unsqueeze(0)
        out = new((1, *product.shape), dtype=x.dtype, device=x.device)
        out[0].copy_(product)
        return out


def turn_of(in_features: int) -> int:
    """Input features of a turn: the most, up to 128, that divide them; a power of two."""
    return min(BLOCK, in_features & -in_features)


def load_block_scaled_mm() -> BlockScaledMM:
    """sglang-kernel's, of CUTLASS. Raises ConfigError where it is missing or does not load."""
    try:
        multiply: BlockScaledMM = importlib.import_module("sgl_kernel").fp8_blockwise_scaled_mm
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"products with FP8 weights in blocks need sglang-kernel: {error}; pip install "
            "'tessera[cuda]', or set engine.quantized_products to dequantize"
        ) from error
    return multiply
