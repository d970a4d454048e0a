"""A rank's share of a layer's experts, kept as a checkpoint stores them. Knows no product."""

from dataclasses import dataclass

import torch

from workers.layers.kept.stacks import Fp4Stack, Fp8Stack
from workers.layers.routed_experts import Gating

Stack = Fp4Stack | Fp8Stack


@dataclass(frozen=True, slots=True)
class KeptExperts:
    """As RoutedWeights, of stacks (experts, 2 * width, hidden_size) and (experts, hidden_size,
    width) of one form."""

    gate_up: Stack
    down: Stack
    gating: Gating
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
