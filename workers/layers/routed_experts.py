"""Experts that somebody else chose for every token: their weights, their gate, and the oracle of
what they compute. Knows no routing."""

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Gating:
    """gate * sigmoid(alpha * gate) * up; with a limit above 0 gate is cut at it from above and up
    from both sides, and up counts one more (gpt-oss, arXiv:2508.10925)."""

    alpha: float = 1.0
    limit: float = 0.0


SILU = Gating()


@dataclass(frozen=True, slots=True)
class RoutedWeights:
    """gate_up (experts, 2 * width, hidden_size) and gate_up_bias (experts, 2 * width), gate over
    up; down (experts, hidden_size, width), down_bias (experts, hidden_size). Both biases or
    none."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gating: Gating
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


RoutedProducts = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, RoutedWeights], torch.Tensor]
"""(hidden (n, hidden_size), ids (n, k), weights (n, k), experts) -> (n, hidden_size), the weighted
sum of what each token's experts make of it."""


def gated(gate_up: torch.Tensor, gating: Gating) -> torch.Tensor:
    """(..., 2 * width), gate over up -> (..., width)."""
    gate, up = gate_up.chunk(2, dim=-1)
    if gating.limit > 0:
        gate = gate.clamp(max=gating.limit)
        up = up.clamp(-gating.limit, gating.limit) + 1.0
    return gate * torch.sigmoid(gating.alpha * gate) * up


def routed_in_torch(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: RoutedWeights
) -> torch.Tensor:
    """The oracle of every RoutedProducts, one pair of token and expert after the other, in
    float32."""
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for token, row in enumerate(ids.tolist()):
        for choice, expert in enumerate(row):
            product = experts.gate_up[expert].float() @ hidden[token].float()
            if experts.gate_up_bias is not None:
                product = product + experts.gate_up_bias[expert].float()
            product = experts.down[expert].float() @ gated(product, experts.gating)
            if experts.down_bias is not None:
                product = product + experts.down_bias[expert].float()
            out[token] += weights[token, choice].float() * product
    return out.to(hidden.dtype)
