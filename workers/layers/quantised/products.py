"""Linear layers' products, whatever their weights are: matrices by the GEMM that was chosen, kept
weights by the products of their form."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from workers.layers.formats.layer import LinearLayer
from workers.layers.gate import Gate
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.matrix import PartialProducts, gated_gemms, partial_gemms
from workers.layers.kept.fp8 import Fp8Blocks, Fp8Rows
from workers.layers.kept.int4 import Int4Groups
from workers.layers.kept.weight import KeptWeight
from workers.layers.quantised.fp8_products import Fp8BlockProduct, Fp8RowProduct
from workers.layers.quantised.int4_products import Int4Product
from workers.layers.quantised.product import KeptGatedProduct, KeptProduct

_PRODUCTS: Mapping[type[KeptWeight], Callable[[Any, bool], KeptProduct]] = {
    Fp8Rows: Fp8RowProduct,
    Fp8Blocks: Fp8BlockProduct,
    Int4Groups: Int4Product,
}


class LinearProducts(PartialProducts, Protocol):
    @property
    def in_features(self) -> int: ...


class GatedProducts(Protocol):
    @property
    def in_features(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x (n, in_features) -> (n, width)."""


def kept_product(kept: KeptWeight, can_split: bool) -> KeptProduct:
    """can_split: whether partial products are summed up by who reads them."""
    return _PRODUCTS[type(kept)](kept, can_split)


def linear_products(
    chooser: GemmChooser, layers: Sequence[LinearLayer], can_split: bool
) -> list[LinearProducts]:
    """One for each of the layers, whose weights have one shape."""
    matrices = [layer for layer in layers if layer.kept is None]
    made: dict[LinearLayer, LinearProducts] = {}
    if matrices:
        gemms = partial_gemms(chooser, [layer.weight for layer in matrices], can_split)
        made |= zip(matrices, gemms, strict=True)
    for layer in layers:
        if layer.kept is not None:
            made[layer] = kept_product(layer.kept, can_split)
    return [made[layer] for layer in layers]


def gated_products(
    chooser: GemmChooser, layers: Sequence[LinearLayer], gate: Gate
) -> list[GatedProducts]:
    """The same of layers that are a gate's rows over an up projection's."""
    matrices = [layer for layer in layers if layer.kept is None]
    made: dict[LinearLayer, GatedProducts] = {}
    if matrices:
        gemms = gated_gemms(chooser, [layer.weight for layer in matrices], gate)
        made |= zip(matrices, gemms, strict=True)
    for layer in layers:
        if layer.kept is not None:
            made[layer] = KeptGatedProduct(kept_product(layer.kept, can_split=True), gate)
    return [made[layer] for layer in layers]
