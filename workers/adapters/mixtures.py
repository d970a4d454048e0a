"""A mixture of experts on a GPU with what adapters add to its experts. Needs Triton."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from workers.adapters.adapted_products import StepGroups
from workers.adapters.expert_bank import ExpertBank
from workers.layers.cuda.expert_adapters import ExpertAdapterMatrices, adapted_partial_products
from workers.layers.cuda.expert_routing import Chosen
from workers.layers.cuda.routers import chooser_of
from workers.layers.moe.experts import Experts
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.new_tensor import NewTensor


@dataclass(frozen=True, slots=True)
class AdaptedMixture:
    """As GroupedMixture, of weights that are matrices."""

    experts: Experts
    choose: Callable[[torch.Tensor], Chosen]
    matrices: ExpertAdapterMatrices
    step: StepGroups
    is_summed: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        parts = self._parts(x)
        return parts.sum(dim=0, keepdim=True) if self.is_summed else parts

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        """Summed up, in a tensor that new makes."""
        out = new((1, *x.shape), dtype=x.dtype, device=x.device)
        return torch.sum(self._parts(x), dim=0, keepdim=True, out=out)

    def _parts(self, x: torch.Tensor) -> torch.Tensor:
        return adapted_partial_products(
            x,
            self.choose(x),
            self.experts.weights,
            self.matrices,
            self.step.slots,
            self.experts.num_parts,
        )


def adapted_mixture(
    mixture: MixtureOfExperts, bank: ExpertBank, step: StepGroups, is_summed: bool
) -> AdaptedMixture:
    matrices = ExpertAdapterMatrices(
        bank.gate_up_a, bank.gate_up_b, bank.down_a, bank.down_b, bank.ranks
    )
    return AdaptedMixture(mixture.experts, chooser_of(mixture), matrices, step, is_summed)
