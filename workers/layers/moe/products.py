"""The experts' products in plain torch, expert by expert, and where others take their place."""

from typing import Protocol

import torch
from torch.nn import functional

from workers.layers.routed_experts import RoutedProducts, RoutedWeights, gated

KERNEL_DTYPES = (torch.bfloat16, torch.float16)


class ExpertAdditions(Protocol):
    """What is added to the products of one expert, in place. tokens: int64 (m,), whose rows x has;
    place: of the expert."""

    def to_gate_up(
        self, out: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, place: int
    ) -> None:
        """out (m, 2 * width), before the gate; x (m, hidden_size)."""

    def to_down(self, out: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, place: int) -> None:
        """out (m, hidden_size), not weighed yet; x (m, width)."""


def products_for(dtype: torch.dtype, device: torch.device, num_parts: int) -> RoutedProducts:
    """Of weights of this dtype. num_parts: into so many all experts are divided; with several, the
    id behind the last one here stands for those of other ranks."""
    if device.type != "cuda" or dtype not in KERNEL_DTYPES:
        return experts_in_torch
    # Triton comes with torch for CUDA only.
    from workers.layers.cuda.routed_experts import ProductsHere, routed_products

    return routed_products if num_parts == 1 else ProductsHere(num_parts)


def experts_in_torch(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: RoutedWeights,
    additions: ExpertAdditions | None = None,
) -> torch.Tensor:
    """A RoutedProducts for any dtype and device. Ids beyond the experts are of none that lies here
    and add nothing. Sums are kept in float32. Asks on the host who was chosen."""
    num_here = experts.gate_up.shape[0]
    out = torch.zeros(hidden.shape, dtype=torch.float32, device=hidden.device)
    for expert in torch.unique(ids).tolist():
        if expert >= num_here:
            break
        tokens, choices = torch.where(ids == expert)
        made = _one_expert(hidden[tokens], tokens, expert, experts, additions)
        out.index_add_(0, tokens, made.float() * weights[tokens, choices].unsqueeze(-1))
    return out.to(hidden.dtype)


def weighing_inputs(products: RoutedProducts) -> RoutedProducts:
    """A RoutedProducts whose weights multiply what experts are given, rounded to its dtype, in
    place of what they make: a choice is a token of its own, of weight 1."""

    def of_weighed(
        hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: RoutedWeights
    ) -> torch.Tensor:
        given = hidden.unsqueeze(1) * weights.to(hidden.dtype).unsqueeze(-1)
        ones = torch.ones_like(weights).view(-1, 1)
        made = products(given.flatten(0, 1), ids.reshape(-1, 1), ones, experts)
        return made.view(given.shape).sum(dim=1)

    return of_weighed


def _one_expert(
    rows: torch.Tensor,
    tokens: torch.Tensor,
    expert: int,
    experts: RoutedWeights,
    additions: ExpertAdditions | None,
) -> torch.Tensor:
    first_bias, last_bias = experts.gate_up_bias, experts.down_bias
    gate_up = functional.linear(
        rows, experts.gate_up[expert], None if first_bias is None else first_bias[expert]
    )
    if additions is not None:
        additions.to_gate_up(gate_up, rows, tokens, expert)
    activated = gated(gate_up, experts.gating)
    made = functional.linear(
        activated, experts.down[expert], None if last_bias is None else last_bias[expert]
    )
    if additions is not None:
        additions.to_down(made, activated, tokens, expert)
    return made
