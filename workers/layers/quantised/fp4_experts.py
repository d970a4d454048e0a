"""Products of many tokens and MXFP4 experts by warpgroups, as the stack keeps the weights: on a GPU
of compute capability 9.0, with the Triton that fp4_warpgroups.py is for. Knows no routing."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from typing import Any

import torch

from workers.layers.cuda.expert_gather import gather_rows
from workers.layers.cuda.expert_routing import Chosen, ExpertBlocks, group
from workers.layers.kept.experts import KeptExperts, Stack
from workers.layers.kept.stacks import WORDS_PER_TURN, Fp4Stack
from workers.layers.quantised.fp4_warpgroup_shape import WarpgroupShape
from workers.layers.routed_experts import SILU, Gating

_WARPS = 4
"""A warpgroup; the kernel adds another one and the warp that brings tiles."""

_ROW_VALUES = 8
"""Of 16 bits, in 16 bytes."""
_FEW_TOKENS = 64
"""The fewest that are multiplied: blocks of less steps of so many take less time."""


@dataclass(frozen=True, slots=True)
class Fp4WarpgroupTiles:
    """How both products are made. most_tokens: of a block, 128 or 256. num_stages: turns of 128
    columns on their way. group: blocks that take a tile of weights one after the other; programs
    take tiles in turns, so that it should have no factor with their number in common."""

    most_tokens: int
    num_stages: int
    group: int

    def __post_init__(self) -> None:
        if self.most_tokens not in (128, 256):
            raise ValueError(f"blocks of {self.most_tokens} tokens: warpgroups take 128 or 256")

    def covers(self, experts: KeptExperts) -> bool:
        """Whether rows of what is multiplied begin where copy engines can: at 16 bytes."""
        down = experts.down
        return down.rows % _ROW_VALUES == 0 and experts.gate_up.rows // 2 % _ROW_VALUES == 0

    def products(
        self, hidden: torch.Tensor, chosen: Chosen, experts: KeptExperts, num_parts: int
    ) -> torch.Tensor:
        """As routed_experts.partial_products, of Fp4Stacks and bfloat16. Needs has_warpgroups."""
        grouped = group(chosen, self.most_tokens, int(num_parts > 1))
        num_tokens, num_chosen = chosen.weights.shape
        rows, blocks = gather_rows(hidden, grouped, num_chosen, _FEW_TOKENS)
        grouped = replace(grouped, blocks=blocks)
        gate_up, down = fp4_stack(experts.gate_up), fp4_stack(experts.down)
        width = gate_up.rows // 2
        activated = rows.new_empty((rows.shape[0], width))
        shape = self._shape(gate_up, width, num_chosen, experts.gate_up_bias, experts.gating)
        self._multiply(rows, gate_up, experts.gate_up_bias, chosen, grouped, activated, shape)
        size = num_chosen, num_tokens, down.rows
        out = rows.new_zeros(size) if num_parts > 1 else rows.new_empty(size)
        shape = self._shape(down, down.rows, num_chosen, experts.down_bias, None)
        self._multiply(activated, down, experts.down_bias, chosen, grouped, out, shape)
        return out

    def _shape(
        self,
        stack: Fp4Stack,
        width: int,
        num_chosen: int,
        bias: torch.Tensor | None,
        gating: Gating | None,
    ) -> WarpgroupShape:
        """gating: None where there is no gate."""
        gate = SILU if gating is None else gating
        return WarpgroupShape(
            depth=stack.columns,
            width=width,
            num_chosen=num_chosen,
            has_bias=bias is not None,
            is_gated=gating is not None,
            alpha=gate.alpha,
            limit=gate.limit,
            group=self.group,
            most_tokens=self.most_tokens,
            num_stages=self.num_stages,
        )

    def _multiply(
        self,
        x: torch.Tensor,
        stack: Fp4Stack,
        bias: torch.Tensor | None,
        chosen: Chosen,
        grouped: ExpertBlocks,
        out: torch.Tensor,
        shape: WarpgroupShape,
    ) -> None:
        """x: rows by expert -> out: gated rows by expert, or weighed ones at (choice, token)."""
        kernel = _kernel()
        words = stack.words.view(-1, stack.words.shape[2])
        properties = torch.cuda.get_device_properties(x.device)
        most_tiles = grouped.max_blocks * shape.num_tiles
        kernel.multiply_experts_kernel[(min(properties.multi_processor_count, most_tiles),)](
            kernel.describe_rows(x, kernel.BOX_TOKENS.value, kernel.HALF_COLUMNS.value),
            kernel.describe_rows(words, kernel.BOX_ROWS.value, WORDS_PER_TURN),
            stack.scales,
            x if bias is None else bias,
            chosen.weights,
            grouped.pairs,
            grouped.blocks,
            grouped.num_blocks,
            out,
            grouped.max_blocks,
            chosen.weights.shape[0],
            shape=shape,
            num_warps=_WARPS,
        )


def _kernel() -> Any:
    """Not imported before it is asked for: another Triton may have no such Gluon."""
    return importlib.import_module("workers.layers.quantised.fp4_warpgroups")


def fp4_stack(stack: Stack) -> Fp4Stack:
    if not isinstance(stack, Fp4Stack):
        raise TypeError(f"{type(stack).__name__} has no words of four bits")
    return stack
