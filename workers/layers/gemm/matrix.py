"""Weight matrices with the GEMM chosen for each number of tokens. Knows no layer."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from workers.layers.gate import Gate
from workers.layers.gemm.build import Activate, Multiply
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.configs import GemmShape, Role
from workers.layers.new_tensor import NewTensor


class PartialProducts(Protocol):
    """x (n, in_features) -> (parts, n, out_features), whose sum over parts is the product."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        """In a tensor that new makes, of one part unless the product was chosen for alone."""


class PartialGemm:
    """x (n, in_features) @ weight.T as partial products (splits, n, out_features).

    Their sum over splits is the product; one split has x's dtype, several are float32.
    gemms: by the most tokens that each is for.
    """

    def __init__(self, weight: torch.Tensor, gemms: Mapping[int, Multiply]) -> None:
        self.weight = weight
        self._max_tokens = sorted(gemms)
        self._gemms = [gemms[max_tokens] for max_tokens in self._max_tokens]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.into(torch.empty, x)

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        """The product in a tensor that new makes."""
        return self._gemms[bisect_left(self._max_tokens, x.shape[0])](x, self.weight, new)


class BiasedProducts:
    """PartialProducts with a bias (out_features,) in their sum, by one more launch."""

    def __init__(self, products: PartialProducts, bias: torch.Tensor) -> None:
        self._products, self._bias = products, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._with_bias(self._products(x))

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        return self._with_bias(self._products.into(new, x))

    def _with_bias(self, parts: torch.Tensor) -> torch.Tensor:
        parts[0].add_(self._bias)
        return parts


class GatedGemm:
    """gate(x @ gate.T) * (x @ up.T) -> (n, width), weight being gate over up."""

    def __init__(self, weight: torch.Tensor, gemms: Mapping[int, Activate]) -> None:
        self.weight = weight
        self._max_tokens = sorted(gemms)
        self._gemms = [gemms[max_tokens] for max_tokens in self._max_tokens]

    @property
    def in_features(self) -> int:
        return self.weight.shape[1]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._gemms[bisect_left(self._max_tokens, x.shape[0])](x, self.weight)


def partial_gemms(
    chooser: GemmChooser, weights: Sequence[torch.Tensor], can_split: bool
) -> list[PartialGemm]:
    """One for each of the weights, which have one shape."""
    gemms = chooser.gemms(_shape(weights, "split" if can_split else "whole"), weights)
    return [PartialGemm(weight, gemms) for weight in weights]


def gated_gemms(
    chooser: GemmChooser, weights: Sequence[torch.Tensor], gate: Gate
) -> list[GatedGemm]:
    """One for each of the weights, which have one shape."""
    gemms = chooser.gated_gemms(_shape(weights, "gated"), weights, gate)
    return [GatedGemm(weight, gemms) for weight in weights]


def _shape(weights: Sequence[torch.Tensor], role: Role) -> GemmShape:
    out_features, in_features = weights[0].shape
    return GemmShape(out_features, in_features, role)
