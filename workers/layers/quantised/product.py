"""What the products with kept weights have in common."""

from abc import ABC, abstractmethod

import torch

from workers.layers.cuda.activation import gate_and_mul
from workers.layers.gate import Gate
from workers.layers.new_tensor import NewTensor


class KeptProduct(ABC):
    """PartialProducts of a weight as it is kept: x (n, in_features), contiguous, of a dtype that
    the weight names."""

    in_features: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.into(torch.empty, x)

    @abstractmethod
    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        """(parts, n, out_features), whose sum over parts is the product, in a tensor that new
        makes. One part has x's dtype, several are float32."""


class KeptGatedProduct:
    """gate(x @ gate.T) * (x @ up.T) -> (n, width), the product's weight being gate over up."""

    def __init__(self, product: KeptProduct, gate: Gate) -> None:
        self._product, self._gate = product, gate

    @property
    def in_features(self) -> int:
        return self._product.in_features

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return gate_and_mul(self._product(x), x.dtype, self._gate)
