"""Routed experts of transformers' code in two grouped products. Needs Triton."""

import torch

from workers.layers.cuda.expert_gemm import activate_experts, project_experts
from workers.layers.cuda.expert_routing import counted, group
from workers.layers.cuda.expert_tiles import tiles_for
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.routed_experts import RoutedWeights


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
