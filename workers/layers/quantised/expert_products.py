"""Experts with kept weights in two grouped products: in tiles of them as they are kept or, of many
rows, with activations in FP8 or with matrices made for the one product.

Tiles of an H200, 2026-11-28, by warpgroups 2026-11-29: benchmarks/h200/quantised_experts.py --sweep
at 0.06 to 1,024 rows an expert, FP8 by warpgroups at 4 to 512, MXFP4 at 128 and 1,024. Between
these points the tables change where the tiles are full.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.layers.cuda.expert_routing import Chosen, group, pairs_here
from workers.layers.cuda.expert_tiles import table_of, tiles_for
from workers.layers.gemm.device_limits import DeviceLimits
from workers.layers.kept.experts import KeptExperts, Stack
from workers.layers.kept.stacks import Fp4Stack, Fp8Stack
from workers.layers.quantised.expert_fp8 import RoundedTiles
from workers.layers.quantised.expert_gemm import KeptTiles
from workers.layers.quantised.expert_splits import SplitShape, SplitTiles
from workers.layers.quantised.expert_spread import spread
from workers.layers.quantised.expert_warpgroups import Fp8WarpgroupTiles
from workers.layers.quantised.fp4_experts import Fp4WarpgroupTiles
from workers.layers.quantised.warpgroup_limits import has_warpgroups


class ExpertWay(Protocol):
    def products(
        self, hidden: torch.Tensor, chosen: Chosen, experts: KeptExperts, num_parts: int
    ) -> torch.Tensor:
        """As routed_experts.partial_products, whose k may be a multiple of it, a choice having
        several parts, or 1: they are summed up."""


@dataclass(frozen=True, slots=True)
class AsKept:
    """In tiles of weights as they are kept, by activations as they are."""

    tiles: KeptTiles

    def products(
        self, hidden: torch.Tensor, chosen: Chosen, experts: KeptExperts, num_parts: int
    ) -> torch.Tensor:
        grouped = group(chosen, self.tiles.block_rows, int(num_parts > 1))
        activated = self.tiles.activate(
            hidden,
            experts.gate_up,
            grouped,
            chosen.ids.shape[1],
            experts.gate_up_bias,
            experts.gating,
        )
        return self.tiles.project(
            activated, experts.down, chosen.weights, grouped, experts.down_bias, num_parts > 1
        )


@dataclass(frozen=True, slots=True)
class InSplits:
    """In tiles of weights as they are kept whose turns programs share out: for few rows."""

    tiles: SplitTiles

    def products(
        self, hidden: torch.Tensor, chosen: Chosen, experts: KeptExperts, num_parts: int
    ) -> torch.Tensor:
        tiles, gate_up = self.tiles, experts.gate_up
        num_counters = tiles.counters_a_block(gate_up)
        grouped = group(chosen, tiles.block_rows, int(num_parts > 1), num_counters)
        num_chosen = chosen.ids.shape[1]
        activated = tiles.activate(
            hidden, gate_up, grouped, num_chosen, experts.gate_up_bias, experts.gating
        )
        return tiles.project(
            activated, experts.down, chosen.weights, grouped, experts.down_bias, num_parts > 1
        )


@dataclass(frozen=True, slots=True)
class ByMatrices:
    """With matrices of 16 bits, one stack's after the other's: memory of the larger."""

    def products(
        self, hidden: torch.Tensor, chosen: Chosen, experts: KeptExperts, num_parts: int
    ) -> torch.Tensor:
        down = experts.down
        limits = DeviceLimits.of(hidden.device)
        table = table_of(down.rows, down.columns, limits)
        num_pairs, num_chosen = pairs_here(chosen, num_parts), chosen.ids.shape[1]
        activate, project = tiles_for(table, num_pairs, down.num_matrices, limits.shared_bytes)
        grouped = group(chosen, activate.block_rows, int(num_parts > 1))
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
            num_parts > 1,
        )


@dataclass(frozen=True, slots=True)
class OnWarpgroups:
    """By warpgroups where their kernels are for the GPU, the Triton and the sizes, elsewhere as
    others."""

    tiles: Fp8WarpgroupTiles | Fp4WarpgroupTiles
    others: ExpertWay

    def products(
        self, hidden: torch.Tensor, chosen: Chosen, experts: KeptExperts, num_parts: int
    ) -> torch.Tensor:
        is_covered = (
            hidden.is_cuda
            and has_warpgroups(DeviceLimits.of(hidden.device))
            and self.tiles.covers(experts)
        )
        way = self.tiles if is_covered else self.others
        return way.products(hidden, chosen, experts, num_parts)


WayTable = tuple[tuple[float, ExpertWay], ...]
"""By the most rows an expert, on average, that each is for."""

TABLES: Mapping[type[Stack], WayTable] = {
    Fp4Stack: (
        (1, InSplits(SplitTiles(16, SplitShape(64, 4, 4, 4), SplitShape(128, 4, 3, 4)))),
        (15.75, AsKept(KeptTiles(16, 128, 3, 4))),
        (47.75, AsKept(KeptTiles(32, 128, 3, 4))),
        (192, OnWarpgroups(Fp4WarpgroupTiles(256, 3, 5), AsKept(KeptTiles(64, 64, 3, 4)))),
        (math.inf, OnWarpgroups(Fp4WarpgroupTiles(256, 3, 5), ByMatrices())),
    ),
    Fp8Stack: (
        (1, InSplits(SplitTiles(16, SplitShape(32, 2, 4, 4), SplitShape(128, 1, 3, 4)))),
        (8, AsKept(KeptTiles(16, 128, 3, 4))),
        (31.75, OnWarpgroups(Fp8WarpgroupTiles(4), AsKept(KeptTiles(32, 128, 3, 4)))),
        (math.inf, OnWarpgroups(Fp8WarpgroupTiles(4), RoundedTiles(64, 3, 8))),
    ),
}


def kept_partial_products(
    hidden: torch.Tensor, chosen: Chosen, experts: KeptExperts, num_parts: int = 1
) -> torch.Tensor:
    """As ExpertWay.products."""
    rows = pairs_here(chosen, num_parts) / experts.down.num_matrices
    way = next(way for most, way in TABLES[type(experts.down)] if rows <= most)
    return way.products(hidden, chosen, experts, num_parts)
