"""Experts with kept weights in two grouped products: in tiles of them as they are kept or, of many
rows, with matrices made for the one product.

Not measured yet: benchmarks/h200/quantised_experts.py --sweep prints what is fastest.
"""

from collections.abc import Mapping

import torch

from workers.layers.cuda.expert_routing import Chosen, group
from workers.layers.cuda.expert_tiles import table_of, tiles_for
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.kept.experts import KeptExperts, Stack
from workers.layers.kept.stacks import Fp4Stack, Fp8Stack
from workers.layers.quantised.expert_gemm import KeptTiles
from workers.layers.quantised.expert_spread import spread

KeptTileTable = tuple[tuple[float, KeptTiles], ...]
"""By the most rows an expert, on average, that each is for; more take matrices."""

TABLES: Mapping[type[Stack], KeptTileTable] = {
    Fp4Stack: (
        (15.75, KeptTiles(16, 64, 4, 4)),
        (31.75, KeptTiles(32, 64, 4, 4)),
        (64, KeptTiles(64, 128, 3, 8)),
        (192, KeptTiles(128, 128, 2, 8)),
    ),
    Fp8Stack: (
        (15.75, KeptTiles(16, 64, 4, 4)),
        (31.75, KeptTiles(32, 64, 4, 4)),
        (96, KeptTiles(64, 128, 3, 8)),
    ),
}


def kept_partial_products(
    hidden: torch.Tensor, chosen: Chosen, experts: KeptExperts, num_elsewhere: int
) -> torch.Tensor:
    """As routed_experts.partial_products."""
    rows = chosen.ids.numel() / experts.down.num_matrices
    table = TABLES[type(experts.down)]
    tiles = next((tiles for most, tiles in table if rows <= most), None)
    if tiles is None:
        return by_matrices(hidden, chosen, experts, num_elsewhere)
    return by_tiles(hidden, chosen, experts, num_elsewhere, tiles)


def by_tiles(
    hidden: torch.Tensor,
    chosen: Chosen,
    experts: KeptExperts,
    num_elsewhere: int,
    tiles: KeptTiles,
) -> torch.Tensor:
    """The same, with these tiles."""
    grouped = group(chosen, tiles.block_rows, num_elsewhere)
    num_chosen = chosen.ids.shape[1]
    activated = tiles.activate(
        hidden, experts.gate_up, grouped, num_chosen, experts.gate_up_bias, experts.gating
    )
    return tiles.project(
        activated, experts.down, chosen.weights, grouped, experts.down_bias, num_elsewhere > 0
    )


def by_matrices(
    hidden: torch.Tensor, chosen: Chosen, experts: KeptExperts, num_elsewhere: int
) -> torch.Tensor:
    """The same, with matrices of 16 bits, one stack's after the other's: memory of the larger."""
    down = experts.down
    limits = DeviceLimits.of(hidden.device)
    table = table_of(down.rows, down.columns, limits)
    num_pairs, num_chosen = chosen.ids.numel(), chosen.ids.shape[1]
    activate, project = tiles_for(table, num_pairs, down.num_matrices, limits.shared_bytes)
    grouped = group(chosen, activate.block_rows, num_elsewhere)
    activated = activate.activate(
        hidden,
        spread(experts.gate_up, hidden.dtype),
        grouped,
        num_chosen,
        experts.gate_up_bias,
        experts.gating,
    )
    return project.project(
        activated,
        spread(down, hidden.dtype),
        chosen.weights,
        grouped,
        experts.down_bias,
        num_elsewhere > 0,
    )
