"""Experts with kept weights in two grouped products, and their tiles. Nothing is measured yet."""

import math

import torch

from workers.layers.cuda.expert_routing import Chosen, group
from workers.layers.kept.experts import KeptExperts
from workers.layers.quantised.expert_gemm import KeptTiles

_TILES: tuple[tuple[float, KeptTiles], ...] = (
    (15.75, KeptTiles(16, 64, 4, 4)),
    (31.75, KeptTiles(32, 64, 4, 4)),
    (64, KeptTiles(64, 128, 3, 8)),
    (math.inf, KeptTiles(128, 128, 2, 8)),
)
"""By the most rows an expert, on average, that each is for."""


def kept_partial_products(
    hidden: torch.Tensor, chosen: Chosen, experts: KeptExperts, num_elsewhere: int
) -> torch.Tensor:
    """As routed_experts.partial_products."""
    rows = chosen.ids.numel() / experts.down.num_matrices
    tiles = next(tiles for most, tiles in _TILES if rows <= most)
    grouped = group(chosen, tiles.block_rows, num_elsewhere)
    activated = tiles.activate(
        hidden,
        experts.gate_up,
        grouped,
        chosen.ids.shape[1],
        experts.gate_up_bias,
        experts.gating,
    )
    return tiles.project(
        activated, experts.down, chosen.weights, grouped, experts.down_bias, num_elsewhere > 0
    )
