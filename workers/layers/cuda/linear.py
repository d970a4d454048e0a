"""Weight matrices with the GEMM chosen for each number of tokens. Knows no layer."""

from collections.abc import Sequence

import torch

from workers.layers.cuda.gemm import GemmConfig
from workers.layers.cuda.gemm_choice import (
    Choices,
    GemmChooser,
    GemmShape,
    Role,
    multiply,
    multiply_gated,
)


class _ChosenGemm:
    def __init__(self, weight: torch.Tensor, choices: Choices) -> None:
        self.weight = weight
        self._choices = sorted(choices.items())

    def config(self, num_tokens: int) -> GemmConfig | None:
        for max_tokens, config in self._choices:
            if num_tokens <= max_tokens:
                return config
        return None


class PartialGemm(_ChosenGemm):
    """x (n, in_features) @ weight.T as partial products (splits, n, out_features).

    Their sum over splits is the product; one split has x's dtype, several are float32.
    """

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return multiply(x, self.weight, self.config(x.shape[0]))


class GatedGemm(_ChosenGemm):
    """silu(x @ gate.T) * (x @ up.T) -> (n, width), weight being gate over up."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return multiply_gated(x, self.weight, self.config(x.shape[0]))


def partial_gemms(
    chooser: GemmChooser, weights: Sequence[torch.Tensor], can_split: bool
) -> list[PartialGemm]:
    """One for each of the weights, which have one shape."""
    choices = _choices(chooser, weights, "split" if can_split else "whole")
    return [PartialGemm(weight, choices) for weight in weights]


def gated_gemms(chooser: GemmChooser, weights: Sequence[torch.Tensor]) -> list[GatedGemm]:
    """One for each of the weights, which have one shape."""
    choices = _choices(chooser, weights, "gated")
    return [GatedGemm(weight, choices) for weight in weights]


def _choices(chooser: GemmChooser, weights: Sequence[torch.Tensor], role: Role) -> Choices:
    out_features, in_features = weights[0].shape
    return chooser.choose(GemmShape(out_features, in_features, role), weights)
