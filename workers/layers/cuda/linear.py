"""A weight matrix with the GEMM chosen for each number of tokens. Knows no layer."""

from collections.abc import Sequence

import torch

from workers.layers.cuda.gemm import GemmConfig, triton_gemm
from workers.layers.cuda.gemm_choice import Choices, GemmChooser, GemmShape


class ChosenGemm:
    """x (n, in_features) @ weight.T as partial products (splits, n, out_features).

    Their sum over splits is the product; one split has x's dtype, several are float32.
    """

    def __init__(self, weight: torch.Tensor, choices: Choices) -> None:
        self._weight = weight
        self._transposed = weight.t()
        self._choices = sorted(choices.items())

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        config = self._config(x.shape[0])
        if config is None:
            return torch.mm(x, self._transposed).unsqueeze(0)
        return triton_gemm(x, self._weight, config)

    def _config(self, num_tokens: int) -> GemmConfig | None:
        for max_tokens, config in self._choices:
            if num_tokens <= max_tokens:
                return config
        return None


def choose_gemms(
    chooser: GemmChooser, weights: Sequence[torch.Tensor], can_split: bool
) -> list[ChosenGemm]:
    """One for each of the weights, which have one shape."""
    out_features, in_features = weights[0].shape
    choices = chooser.choose(GemmShape(out_features, in_features, can_split), weights)
    return [ChosenGemm(weight, choices) for weight in weights]
