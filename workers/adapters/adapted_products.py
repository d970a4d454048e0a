"""A layer's products with what the adapters of a step's tokens add to their sum."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch

from workers.layers.cuda.adapter_groups import TokenGroups
from workers.layers.cuda.adapter_products import AdapterMatrices
from workers.layers.gemm.matrix import PartialProducts
from workers.layers.new_tensor import NewTensor


@dataclass(slots=True)
class StepGroups:
    """Of the pass that runs, or is being captured."""

    of_pass: TokenGroups | None = field(default=None)

    @property
    def groups(self) -> TokenGroups:
        assert self.of_pass is not None, "layers with adapters run within a dressed pass"
        return self.of_pass


class AddAdapters(Protocol):
    """Makes the PartialProducts of a layer with adapters from its own."""

    def __call__(
        self, products: PartialProducts, matrices: AdapterMatrices, step: StepGroups
    ) -> PartialProducts: ...


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


@dataclass(frozen=True, slots=True)
class ShrunkBeside:
    """The product and, on a stream of its own, the adapters' first; then their second.

    The tensor between them belongs to the product's stream, which waits for the other one before
    anything can take its memory.
    """

    products: PartialProducts
    matrices: AdapterMatrices
    step: StepGroups
    stream: torch.cuda.Stream

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._adapted(self.products, x)

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        return self._adapted(partial(self.products.into, new), x)

    def _adapted(
        self, products: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
    ) -> torch.Tensor:
        main, groups = torch.cuda.current_stream(x.device), self.step.groups
        shrunk = self.matrices.new_shrunk(x)
        self.stream.wait_stream(main)
        with torch.cuda.stream(self.stream):
            self.matrices.shrink(shrunk, x, groups, follows_own_stream=False)
        parts = products(x)
        main.wait_stream(self.stream)
        self.matrices.expand(parts[0], shrunk, groups, follows_own_stream=False)
        return parts
