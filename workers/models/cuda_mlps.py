"""Feed-forward blocks over fused kernels, as what joins them with the stream takes them.

Needs Triton.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.layers.cuda.activation import gate_and_mul
from workers.layers.cuda.experts import GroupedMixture
from workers.layers.formats.layer import LinearLayer
from workers.layers.gate import Gate
from workers.layers.gated_mlp import GatedMLP
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.matrix import PartialProducts
from workers.layers.mlp import Mlp
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.quantised.products import (
    GatedProducts,
    LinearProducts,
    gated_products,
    linear_products,
)


class FusedMlp(Protocol):
    """An Mlp as a join takes it. last: what is joined is last(inner(hidden))."""

    @property
    def last(self) -> PartialProducts: ...

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: normalised input (n, hidden_size)."""


@dataclass(frozen=True, slots=True)
class DenseMlp:
    gate_up: GatedProducts
    last: LinearProducts

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.gate_up(hidden)


@dataclass(frozen=True, slots=True)
class UnfusedMlp:
    """Whose activation is a launch of its own: adapters add to what comes before it."""

    gate_up: PartialProducts
    last: PartialProducts
    gate: Gate

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return gate_and_mul(self.gate_up(hidden), hidden.dtype, self.gate)


@dataclass(frozen=True, slots=True)
class FusedMixture:
    last: PartialProducts

    def inner(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def fused_mlps(chooser: GemmChooser, mlps: Sequence[Mlp], is_alone: bool) -> list[FusedMlp]:
    """is_alone: whether no other rank's products are added to this one's."""
    dense = [mlp for mlp in mlps if isinstance(mlp, GatedMLP)]
    fused: dict[Mlp, FusedMlp] = {
        mlp: FusedMixture(GroupedMixture(mlp, is_summed=not is_alone))
        for mlp in mlps
        if isinstance(mlp, MixtureOfExperts)
    }
    if dense:
        gate_up = gated_products(chooser, [x.gate_up_proj for x in dense], dense[0].gate)
        down = linear_products(chooser, [x.down_proj for x in dense], is_alone)
        fused |= zip(dense, map(DenseMlp, gate_up, down), strict=True)
    return [fused[mlp] for mlp in mlps]


def unfused_mlps(
    chooser: GemmChooser,
    mlps: Sequence[GatedMLP],
    adapt: Callable[[LinearLayer, PartialProducts], PartialProducts],
    is_alone: bool,
) -> list[UnfusedMlp]:
    """Of blocks of one shape. adapt: what adapters add to a layer's products. is_alone: as
    fused_mlps."""
    gate_up = linear_products(chooser, [x.gate_up_proj for x in mlps], True)
    down = linear_products(chooser, [x.down_proj for x in mlps], is_alone)
    return [
        UnfusedMlp(
            adapt(mlp.gate_up_proj, gate_up[index]), adapt(mlp.down_proj, down[index]), mlp.gate
        )
        for index, mlp in enumerate(mlps)
    ]
