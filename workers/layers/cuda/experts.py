"""A mixture of experts in grouped products: routed and shared experts in one pair of them.

Experts that all tokens share are pieces of a routed expert's width, taken by every token: see
Experts. Needs Triton.
"""

import torch

from workers.layers.cuda.routed_experts import partial_products
from workers.layers.cuda.routers import chooser_of
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.new_tensor import NewTensor


class GroupedMixture:
    """(n, hidden_size), contiguous -> partial sums (num_choices, n, hidden_size) of this rank.

    is_summed: whether they are summed up first, (1, n, hidden_size): other ranks' are added then.
    """

    def __init__(self, mixture: MixtureOfExperts, is_summed: bool) -> None:
        self._experts, self._is_summed = mixture.experts, is_summed
        self._choose = chooser_of(mixture)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._parts(x)
        return parts.sum(dim=0, keepdim=True) if self._is_summed else parts

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        """Summed up, in a tensor that new makes."""
        out = new((1, *x.shape), dtype=x.dtype, device=x.device)
        return torch.sum(self._parts(x), dim=0, keepdim=True, out=out)

    def _parts(self, x: torch.Tensor) -> torch.Tensor:
        experts = self._experts
        return partial_products(x, self._choose(x), experts.weights, experts.num_elsewhere)
