"""Experts that were chosen for every token, in two grouped products. Needs Triton."""

from dataclasses import dataclass

import torch

from workers.layers.cuda.expert_routing import Chosen, counted, group, pairs_here
from workers.layers.cuda.expert_tiles import Tiles, table_for, tiles_for
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.routed_experts import RoutedWeights

_MANY_ROWS = 128
"""Of an expert: has the last of the tiles."""


def partial_products(
    hidden: torch.Tensor, chosen: Chosen, experts: RoutedWeights, num_parts: int = 1
) -> torch.Tensor:
    """hidden (n, hidden_size), contiguous -> (k, n, hidden_size), whose sum over the k choices is
    what the experts make. num_parts: into so many all experts are divided, of which these are one:
    with several, chosen counts one beyond them, which other ranks have: its pairs are 0."""
    activate, project = _tiles(pairs_here(chosen, num_parts), experts)
    grouped = group(chosen, activate.block_rows, int(num_parts > 1))
    activated = activate.activate(
        hidden,
        experts.gate_up,
        grouped,
        chosen.ids.shape[1],
        experts.gate_up_bias,
        experts.gating,
    )
    leaves_out = num_parts > 1
    return project.project(
        activated, experts.down, chosen.weights, grouped, experts.down_bias, leaves_out
    )


def _tiles(num_pairs: int, experts: RoutedWeights) -> Tiles:
    limits = DeviceLimits.of(experts.down.device)
    table = table_for(experts, limits)
    return tiles_for(table, num_pairs, experts.down.shape[0], limits.shared_bytes)


def routed_products(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: RoutedWeights
) -> torch.Tensor:
    """A RoutedProducts."""
    return _summed(hidden, ids, weights, experts, 1)


@dataclass(frozen=True, slots=True)
class ProductsHere:
    """The same of one of num_parts parts of all experts: the id behind the last of them stands for
    those of other ranks."""

    num_parts: int

    def __call__(
        self,
        hidden: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor,
        experts: RoutedWeights,
    ) -> torch.Tensor:
        return _summed(hidden, ids, weights, experts, self.num_parts)


def _summed(
    hidden: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    experts: RoutedWeights,
    num_parts: int,
) -> torch.Tensor:
    num_counted = experts.gate_up.shape[0] + int(num_parts > 1)
    chosen = counted(weights.float().contiguous(), ids.int().contiguous(), num_counted)
    return partial_products(hidden.contiguous(), chosen, experts, num_parts).sum(dim=0)


def compile_ahead(experts: RoutedWeights, num_chosen: int) -> None:
    """Run the products once with each of the tiles, so that no step waits for a compiler."""
    num_experts, _, hidden_size = experts.gate_up.shape
    for most_rows, _ in table_for(experts, DeviceLimits.of(experts.down.device)):
        num_tokens = max(1, int(min(most_rows, _MANY_ROWS) * num_experts) // num_chosen)
        hidden = experts.gate_up.new_zeros((num_tokens, hidden_size))
        pairs = torch.arange(num_tokens * num_chosen, device=hidden.device)
        ids = (pairs % num_experts).view(num_tokens, num_chosen)
        routed_products(hidden, ids, hidden.new_zeros(ids.shape), experts)
