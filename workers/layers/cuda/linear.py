"""Weight matrices with the GEMM chosen for each number of tokens. Knows no layer."""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

import torch

from workers.layers.cuda.chosen_gemm import Multiply
from workers.layers.cuda.gemm_candidates import GemmShape, Role
from workers.layers.cuda.gemm_choice import GemmChooser


class _ChosenGemm:
    def __init__(self, weight: torch.Tensor, gemms: Mapping[int, Multiply]) -> None:
        """gemms: by the most tokens that each is for."""
        self.weight = weight
        self._max_tokens = sorted(gemms)
        self._gemms = [gemms[max_tokens] for max_tokens in self._max_tokens]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._gemms[bisect_left(self._max_tokens, x.shape[0])](x, self.weight)


class PartialGemm(_ChosenGemm):
    """x (n, in_features) @ weight.T as partial products (splits, n, out_features).

    Their sum over splits is the product; one split has x's dtype, several are float32.
    """


class GatedGemm(_ChosenGemm):
    """silu(x @ gate.T) * (x @ up.T) -> (n, width), weight being gate over up."""


def partial_gemms(
    chooser: GemmChooser, weights: Sequence[torch.Tensor], can_split: bool
) -> list[PartialGemm]:
    """One for each of the weights, which have one shape."""
    gemms = _gemms(chooser, weights, "split" if can_split else "whole")
    return [PartialGemm(weight, gemms) for weight in weights]


def gated_gemms(chooser: GemmChooser, weights: Sequence[torch.Tensor]) -> list[GatedGemm]:
    """One for each of the weights, which have one shape."""
    gemms = _gemms(chooser, weights, "gated")
    return [GatedGemm(weight, gemms) for weight in weights]


def _gemms(
    chooser: GemmChooser, weights: Sequence[torch.Tensor], role: Role
) -> dict[int, Multiply]:
    out_features, in_features = weights[0].shape
    return chooser.gemms(GemmShape(out_features, in_features, role), weights)
