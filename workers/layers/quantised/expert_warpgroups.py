"""Products with FP8 experts of many rows by warpgroups (fp8_warpgroups.py), on sm90.

Launches what is around them: rows are rounded once and laid out by expert, so that copy engines
bring them. Results lie at (choice, token), as those of other tiles do. Knows no routing.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

import torch

from workers.layers.cuda.expert_routing import Chosen, ExpertBlocks
from workers.layers.kept.experts import KeptExperts
from workers.layers.kept.fp8 import BLOCK
from workers.layers.kept.stacks import Fp8Stack
from workers.layers.quantised.expert_fp8 import fp8_stack
from workers.layers.quantised.expert_rows import place_rows
from workers.layers.quantised.fp8_rounding import Rounded

_BLOCK_ROWS = 128
"""Of pairs of one expert, both warpgroups'."""
_NUM_WARPS = 4
"""A warpgroup; the kernels add another one and the warp that brings tiles."""


@dataclass(frozen=True, slots=True)
class Fp8WarpgroupTiles:
    """How both products are made, of Fp8Stacks without biases. num_stages: turns of 128 columns on
    their way to shared memory, 48 KiB each; 4 at most fit beside what results go by."""

    num_stages: int

    def covers(self, experts: KeptExperts) -> bool:
        """Whether products of these experts can be made so."""
        has_bias = experts.gate_up_bias is not None or experts.down_bias is not None
        return not has_bias and experts.down.rows % (2 * BLOCK) == 0

    def products(
        self, hidden: torch.Tensor, chosen: Chosen, experts: KeptExperts, num_parts: int
    ) -> torch.Tensor:
        """As routed_experts.partial_products. Raises ValueError of experts with biases and of a
        hidden size that is no multiple of 256."""
        if not self.covers(experts):
            raise ValueError("warpgroups add no bias and make pairs of blocks of the output")
        gate_up, down = fp8_stack(experts.gate_up), fp8_stack(experts.down)
        num_here = down.num_matrices
        rows, grouped = place_rows(hidden, chosen, _BLOCK_ROWS, num_here)
        activated = self._activated(rows, experts, gate_up, grouped)
        return self._projected(activated, chosen.weights, down, grouped, num_parts > 1, hidden)

    def _activated(
        self, rows: Rounded, experts: KeptExperts, gate_up: Fp8Stack, grouped: ExpertBlocks
    ) -> Rounded:
        width, num_rows = gate_up.rows // 2, rows.values.shape[0]
        device = rows.values.device
        values = torch.empty((num_rows, width), dtype=rows.values.dtype, device=device)
        scales = torch.empty((width // BLOCK, num_rows), device=device)
        shape = self._shape(gate_up, width // BLOCK, BLOCK, width, 1)
        kernels = _kernels()
        kernels.activate_kernel[(_num_programs(grouped, shape),)](
            kernels.describe(rows.values),
            rows.scales,
            kernels.describe(gate_up.values),
            gate_up.scales,
            grouped.blocks,
            grouped.num_blocks,
            grouped.max_blocks,
            num_rows,
            values,
            scales,
            gating=(experts.gating.alpha, experts.gating.limit),
            shape=shape,
            num_warps=_NUM_WARPS,
            launch_pdl=True,
        )
        return Rounded(values, scales.t())

    def _projected(
        self,
        rows: Rounded,
        weights: torch.Tensor,
        down: Fp8Stack,
        grouped: ExpertBlocks,
        leaves_out: bool,
        hidden: torch.Tensor,
    ) -> torch.Tensor:
        num_tokens, num_chosen = weights.shape
        make = torch.zeros if leaves_out else torch.empty
        size = num_chosen, num_tokens, down.rows
        out = make(size, dtype=hidden.dtype, device=hidden.device)
        shape = self._shape(down, down.rows // (2 * BLOCK), 2 * BLOCK, BLOCK, num_chosen)
        kernels = _kernels()
        kernels.project_kernel[(_num_programs(grouped, shape),)](
            kernels.describe(rows.values),
            rows.scales,
            kernels.describe(down.values),
            down.scales,
            weights,
            grouped.pairs,
            grouped.blocks,
            grouped.num_blocks,
            grouped.max_blocks,
            rows.values.shape[0],
            num_tokens,
            out,
            shape=shape,
            num_warps=_NUM_WARPS,
            launch_pdl=True,
        )
        return out

    def _shape(
        self, stack: Fp8Stack, num_tiles: int, step: int, apart: int, num_chosen: int
    ) -> Any:
        """An fp8_warpgroup_parts.WarpgroupShape."""
        num_turns = stack.columns // BLOCK
        return _kernels().WarpgroupShape(
            num_turns, num_tiles, stack.rows, step, apart, num_chosen, self.num_stages
        )


def _kernels() -> Any:
    """Not imported before they are asked for: another Triton may have no such Gluon."""
    return importlib.import_module("workers.layers.quantised.fp8_warpgroups")


def _num_programs(grouped: ExpertBlocks, shape: Any) -> int:
    """One a multiprocessor: more do not fit."""
    properties = torch.cuda.get_device_properties(grouped.blocks.device)
    most_tiles: int = grouped.max_blocks * shape.num_tiles
    return min(most_tiles, properties.multi_processor_count)
