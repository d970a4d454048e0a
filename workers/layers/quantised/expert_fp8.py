"""Products with FP8 experts of many rows: both operands go to the tensor cores in FP8.

Activations are rounded by a scale a row and group of 128 columns, found from the values at hand:
the tokens' in one launch before, what the gate leaves where it is made, whose tile is a group wide.
A turn is a block of weights; its sum is multiplied by the product of both scales in float32, one
operation an element. Knows no routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from workers.layers.cuda.expert_gating import gated, place
from workers.layers.cuda.expert_routing import Chosen, ExpertBlocks, group
from workers.layers.cuda.launch import begin_dependent, dependent_launch
from workers.layers.kept.experts import KeptExperts
from workers.layers.kept.fp8 import BLOCK
from workers.layers.kept.stacks import Fp8Stack
from workers.layers.quantised.fp8_rounding import Rounded, round_groups, to_fp8

_BLOCK = tl.constexpr(BLOCK)
_BLOCKS_A_GROUP = 12


def _run_block_product(
    part: tl.tensor,
    part_scales: tl.tensor,
    weights: tl.tensor,
    scales: tl.tensor,
    row: tl.tensor,
    turn: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """part (ROWS, 128) @ 128 rows of weights from row on, of one turn, times part's scales (ROWS,)
    and their block's. row: int64, of all experts' rows, a multiple of 128."""
    columns = turn * _BLOCK + tl.arange(0, _BLOCK)
    rows = row + tl.arange(0, _BLOCK)
    tile = tl.load(weights + rows[:, None] * DEPTH_SIZE + columns[None, :])
    scale = tl.load(scales + row // _BLOCK * (DEPTH_SIZE // _BLOCK) + turn)
    return tl.dot(part, tile.T) * (part_scales * scale)[:, None]


block_product = triton.jit(_run_block_product)


def _activate(  # noqa: PLR0913
    x: tl.tensor,
    x_scales: tl.tensor,
    gate_up: tl.tensor,
    scales: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    out: tl.tensor,
    out_scales: tl.tensor,
    max_blocks: tl.tensor,
    x_stride: tl.tensor,
    num_pairs: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    ALPHA: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """The gated x @ gate.T and x @ up.T for the block's rows, at their places by expert, rounded.
    x_stride: rows of a group's scales. DTYPE: of what would be stored without rounding."""
    begin_dependent(IS_DEPENDENT)
    block, tile = place(max_blocks, WIDTH // _BLOCK, GROUP)
    if block < tl.load(num_blocks):
        first = tl.load(blocks + max_blocks + block)
        rows = tl.arange(0, ROWS)
        is_real = rows < tl.load(blocks + 2 * max_blocks + block)
        # Rows that are none are computed from row 0 and not stored.
        token = tl.load(pairs + first + rows, mask=is_real, other=0) // NUM_CHOSEN
        x_at = x + token.to(tl.int64)[:, None] * DEPTH_SIZE + tl.arange(0, _BLOCK)[None, :]
        row = tl.load(blocks + block).to(tl.int64) * (2 * WIDTH) + tile * _BLOCK
        gate = tl.zeros((ROWS, _BLOCK), dtype=tl.float32)
        up = tl.zeros((ROWS, _BLOCK), dtype=tl.float32)
        for turn in range(0, DEPTH_SIZE // _BLOCK):
            part = tl.load(x_at + turn * _BLOCK)
            scale = tl.load(x_scales + turn * x_stride + token)
            gate += block_product(part, scale, gate_up, scales, row, turn, DEPTH_SIZE)
            up += block_product(part, scale, gate_up, scales, row + WIDTH, turn, DEPTH_SIZE)
        activated = gated(gate, up, ALPHA, LIMIT, DTYPE).to(tl.float32)
        values, scale = to_fp8(activated, out.dtype.element_ty)
        columns = tile * _BLOCK + tl.arange(0, _BLOCK)
        target = out + (first + rows).to(tl.int64)[:, None] * WIDTH + columns[None, :]
        tl.store(target, values, mask=is_real[:, None])
        tl.store(out_scales + tile * num_pairs + first + rows, scale, mask=is_real)


def _project(  # noqa: PLR0913
    x: tl.tensor,
    x_scales: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    weights: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    out: tl.tensor,
    max_blocks: tl.tensor,
    num_tokens: tl.tensor,
    num_pairs: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """weight * (x @ down.T) for the block's rows, at (choice, token)."""
    begin_dependent(IS_DEPENDENT)
    block, tile = place(max_blocks, WIDTH // _BLOCK, GROUP)
    if block < tl.load(num_blocks):
        first = tl.load(blocks + max_blocks + block)
        rows = tl.arange(0, ROWS)
        is_real = rows < tl.load(blocks + 2 * max_blocks + block)
        place_of = tl.where(is_real, first + rows, 0)
        x_at = x + place_of.to(tl.int64)[:, None] * DEPTH_SIZE + tl.arange(0, _BLOCK)[None, :]
        row = tl.load(blocks + block).to(tl.int64) * WIDTH + tile * _BLOCK
        product = tl.zeros((ROWS, _BLOCK), dtype=tl.float32)
        for turn in range(0, DEPTH_SIZE // _BLOCK):
            part = tl.load(x_at + turn * _BLOCK)
            scale = tl.load(x_scales + turn * num_pairs + place_of)
            product += block_product(part, scale, down, scales, row, turn, DEPTH_SIZE)
        pair = tl.load(pairs + first + rows, mask=is_real, other=0)
        product *= tl.load(weights + pair, mask=is_real, other=0.0)[:, None]
        to = (pair % NUM_CHOSEN).to(tl.int64) * num_tokens + pair // NUM_CHOSEN
        columns = tile * _BLOCK + tl.arange(0, _BLOCK)
        target = out + to[:, None] * WIDTH + columns[None, :]
        tl.store(target, product.to(out.dtype.element_ty), mask=is_real[:, None])


# Numbers that differ from step to step make no kernels of their own.
_activate_kernel = triton.jit(_activate, do_not_specialize=["max_blocks", "x_stride", "num_pairs"])
_project_kernel = triton.jit(_project, do_not_specialize=["max_blocks", "num_tokens", "num_pairs"])
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


@dataclass(frozen=True, slots=True)
class RoundedTiles:
    """How both products are made, of Fp8Stacks without biases. block_rows: of a block of pairs;
    num_stages, num_warps: Triton's."""

    block_rows: int
    num_stages: int
    num_warps: int

    def products(
        self, hidden: torch.Tensor, chosen: Chosen, experts: KeptExperts, num_parts: int
    ) -> torch.Tensor:
        """As routed_experts.partial_products. Raises ValueError of experts with biases."""
        if experts.gate_up_bias is not None or experts.down_bias is not None:
            raise ValueError("products in FP8 add no bias")
        grouped = group(chosen, self.block_rows, int(num_parts > 1))
        activated = self._activated(hidden, chosen.ids.shape[1], experts, grouped)
        down, weights = fp8_stack(experts.down), chosen.weights
        num_tokens, num_chosen = weights.shape
        make = torch.zeros if num_parts > 1 else torch.empty
        size = num_chosen, num_tokens, down.rows
        out = make(size, dtype=hidden.dtype, device=hidden.device)
        _project_kernel[(grouped.max_blocks * (down.rows // BLOCK),)](
            activated.values,
            activated.scales,
            down.values,
            down.scales,
            weights,
            grouped.pairs,
            grouped.blocks,
            grouped.num_blocks,
            out,
            grouped.max_blocks,
            num_tokens,
            grouped.pairs.shape[0],
            DEPTH_SIZE=down.columns,
            WIDTH=down.rows,
            NUM_CHOSEN=num_chosen,
            **self._launch(hidden),
        )
        return out

    def _activated(
        self, hidden: torch.Tensor, num_chosen: int, experts: KeptExperts, grouped: ExpertBlocks
    ) -> Rounded:
        gate_up, rounded = fp8_stack(experts.gate_up), round_groups(hidden)
        width, num_pairs = gate_up.rows // 2, grouped.pairs.shape[0]
        values = torch.empty((num_pairs, width), dtype=gate_up.values.dtype, device=hidden.device)
        scales = torch.empty((width // BLOCK, num_pairs), device=hidden.device)
        _activate_kernel[(grouped.max_blocks * (width // BLOCK),)](
            rounded.values,
            rounded.scales,
            gate_up.values,
            gate_up.scales,
            grouped.pairs,
            grouped.blocks,
            grouped.num_blocks,
            values,
            scales,
            grouped.max_blocks,
            rounded.scales.stride(1),
            num_pairs,
            DEPTH_SIZE=gate_up.columns,
            WIDTH=width,
            NUM_CHOSEN=num_chosen,
            ALPHA=experts.gating.alpha,
            LIMIT=experts.gating.limit,
            DTYPE=_DTYPES[hidden.dtype],
            **self._launch(hidden),
        )
        return Rounded(values, scales)

    def _launch(self, x: torch.Tensor) -> dict[str, Any]:
        """What both kernels take by name."""
        is_dependent = dependent_launch(x)
        return {
            "ROWS": self.block_rows,
            "GROUP": _BLOCKS_A_GROUP,
            "IS_DEPENDENT": is_dependent,
            "num_stages": self.num_stages,
            "num_warps": self.num_warps,
            "launch_pdl": is_dependent,
        }


def fp8_stack(stack: object) -> Fp8Stack:
    if not isinstance(stack, Fp8Stack):
        raise TypeError(f"{type(stack).__name__} is not multiplied in FP8")
    return stack
