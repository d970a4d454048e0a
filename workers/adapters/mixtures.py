"""A mixture of experts on a GPU with what adapters add to its experts. Needs Triton."""

import torch

from workers.adapters.adapted_products import StepGroups
from workers.adapters.expert_bank import ExpertBank
from workers.layers.cuda.expert_adapters import ExpertAdapterMatrices, adapted_partial_products
from workers.layers.cuda.expert_routing import Chosen
from workers.layers.cuda.experts import GroupedMixture
from workers.layers.moe.experts import Experts
from workers.layers.moe.mixture import MixtureOfExperts


def adapted_mixture(
    mixture: MixtureOfExperts, bank: ExpertBank, step: StepGroups, is_summed: bool
) -> GroupedMixture:
    """Of experts whose weights are matrices."""
    matrices = ExpertAdapterMatrices(
        bank.gate_up_a, bank.gate_up_b, bank.down_a, bank.down_b, bank.ranks.on_device
    )

    def multiply(x: torch.Tensor, chosen: Chosen, experts: Experts) -> torch.Tensor:
        return adapted_partial_products(
            x, chosen, experts.weights, matrices, step.slots, experts.num_parts
        )

    return GroupedMixture(mixture, is_summed, multiply)
