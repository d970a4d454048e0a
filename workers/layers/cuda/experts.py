"""A mixture of experts in grouped products: routed and shared experts in one pair of them.

Experts that all tokens share are pieces of a routed expert's width, taken by every token: see
Experts. Needs Triton.
"""

from collections.abc import Callable

import torch

from workers.layers.cuda.expert_routing import Chosen
from workers.layers.cuda.routed_experts import partial_products
from workers.layers.cuda.routers import chooser_of
from workers.layers.moe.experts import Experts
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.expert_products import kept_partial_products

Multiply = Callable[[torch.Tensor, Chosen, Experts], torch.Tensor]


class GroupedMixture:
    """(n, hidden_size), contiguous -> partial sums (num_parts, n, hidden_size) of this rank: a part
    a choice or, where kept weights are multiplied in splits, a part a split of each.

    is_summed: whether they are summed up first, (1, n, hidden_size): other ranks' are added then.
    multiply: makes the parts; by default as the experts' weights are stored.
    """

    def __init__(
        self, mixture: MixtureOfExperts, is_summed: bool, multiply: Multiply | None = None
    ) -> None:
        self._experts, self._is_summed = mixture.experts, is_summed
        self._choose = chooser_of(mixture)
        usual = _multiply_kept if mixture.experts.is_kept else _multiply
        self._multiply = multiply or usual

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._parts(x)
        return parts.sum(dim=0, keepdim=True) if self._is_summed else parts

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        """Summed up, in a tensor that new makes."""
        out = new((1, *x.shape), dtype=x.dtype, device=x.device)
        return torch.sum(self._parts(x), dim=0, keepdim=True, out=out)

    def _parts(self, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(x, self._choose(x), self._experts)


def _multiply(x: torch.Tensor, chosen: Chosen, experts: Experts) -> torch.Tensor:
    return partial_products(x, chosen, experts.weights, experts.num_parts)


def _multiply_kept(x: torch.Tensor, chosen: Chosen, experts: Experts) -> torch.Tensor:
    kept = experts.kept
    if kept is None:
        raise ValueError("the experts' weights are matrices")
    return kept_partial_products(x, chosen, kept, experts.num_parts)
