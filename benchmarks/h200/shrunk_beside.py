"""Adapters' first products on a stream of their own, beside the layer's product: a candidate for
workers/adapters/adapted_products.py, which adapter_products.py times.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from workers.adapters.adapted_products import StepGroups
from workers.layers.cuda.adapter_products import AdapterMatrices
from workers.layers.gemm.matrix import PartialProducts
from workers.layers.new_tensor import NewTensor


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
