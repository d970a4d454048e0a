"""A layer's products with what the adapters of a step's tokens add to their sum."""

from dataclasses import dataclass, field
from typing import Protocol

import torch

from workers.layers.cuda.adapter_groups import TokenGroups
from workers.layers.cuda.adapter_products import AdapterMatrices
from workers.layers.gemm.matrix import PartialProducts
from workers.layers.new_tensor import NewTensor


@dataclass(slots=True)
class StepGroups:
    """Of the pass that runs, or is being captured. slot_of_token: int32 (n,), 0 for none; where
    somebody asks for it."""

    of_pass: TokenGroups | None = field(default=None)
    slot_of_token: torch.Tensor | None = field(default=None)

    @property
    def groups(self) -> TokenGroups:
        assert self.of_pass is not None, "layers with adapters run within a dressed pass"
        return self.of_pass

    @property
    def slots(self) -> torch.Tensor:
        assert self.slot_of_token is not None, "nobody has asked for the slots of tokens"
        return self.slot_of_token


class AddAdapters(Protocol):
    """Makes the PartialProducts of a layer with adapters from its own."""

    def __call__(
        self, products: PartialProducts, matrices: AdapterMatrices, step: StepGroups
    ) -> PartialProducts: ...


@dataclass(frozen=True, slots=True)
class AdapterWays:
    """By what becomes of a layer's result: ranks sum up theirs (over_ranks), or it is this rank's.

    Of what ranks sum up each adds what its own columns of A and all of B make of its own inputs."""

    own: AddAdapters
    over_ranks: AddAdapters


@dataclass(frozen=True, slots=True)
class AddedBehind:
    """The product first, then both products of the adapters."""

    products: PartialProducts
    matrices: AdapterMatrices
    step: StepGroups

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._adapted(self.products(x), x)

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        return self._adapted(self.products.into(new, x), x)

    def _adapted(self, parts: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        self.matrices.add_to(parts[0], x, self.step.groups)
        return parts
