"""Routed experts of transformers' code in two grouped products. Needs Triton."""

import torch

from workers.layers.cuda.expert_gemm import activate_experts, project_experts
from workers.layers.cuda.expert_routing import counted, group
from workers.layers.cuda.expert_tiles import BY_ROWS, tiles_for
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.routed_experts import RoutedWeights

_MANY_ROWS = 128
"""Of an expert: has the last of the tiles."""


def routed_products(
    hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: RoutedWeights
) -> torch.Tensor:
    """A RoutedProducts."""
    num_experts, num_chosen = experts.gate_up.shape[0], ids.shape[1]
    weights = weights.float().contiguous()
    chosen = counted(weights, ids.int().contiguous(), num_experts)
    shared_bytes = DeviceLimits.of(hidden.device).shared_bytes
    activate, project = tiles_for(ids.numel(), num_experts, shared_bytes)
    grouped = group(chosen, activate.block_rows)
    activated = activate_experts(
        hidden.contiguous(),
        experts.gate_up,
        grouped,
        num_chosen,
        activate,
        experts.gate_up_bias,
        experts.gating,
    )
    parts = project_experts(activated, experts.down, weights, grouped, project, experts.down_bias)
    return parts.sum(dim=0)


def compile_ahead(experts: RoutedWeights, num_chosen: int) -> None:
    """Run the products once with each of the tiles, so that no step waits for a compiler."""
    num_experts, _, hidden_size = experts.gate_up.shape
    for most_rows, _ in BY_ROWS:
        num_tokens = max(1, min(most_rows, _MANY_ROWS) * num_experts // num_chosen)
        hidden = experts.gate_up.new_zeros((num_tokens, hidden_size))
        pairs = torch.arange(num_tokens * num_chosen, device=hidden.device)
        ids = (pairs % num_experts).view(num_tokens, num_chosen)
        routed_products(hidden, ids, hidden.new_zeros(ids.shape), experts)
