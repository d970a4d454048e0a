"""Products with the kept weights of chosen experts: the grouped products of expert_gemm.py over
weights that become 16 bits wide in registers. Knows no routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from workers.layers.cuda.expert_gating import add_bias, gated, place
from workers.layers.cuda.expert_routing import ExpertBlocks
from workers.layers.cuda.launch import begin_dependent, dependent_launch
from workers.layers.kept.experts import Stack
from workers.layers.kept.stacks import TURN, Fp4Stack
from workers.layers.quantised.expert_turns import (
    add_turn,
    scale_rows,
    sum_turns,
    turn_inputs,
    weight_rows,
)
from workers.layers.routed_experts import Gating

_TURN = tl.constexpr(TURN)
_BLOCKS_A_GROUP = 12


def _activate(  # noqa: PLR0913
    x: tl.tensor,
    gate_up: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    out: tl.tensor,
    max_blocks: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    ALPHA: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
    IS_FP4: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """The gated x @ gate.T and x @ up.T for the block's rows, at their places by expert."""
    begin_dependent(IS_DEPENDENT)
    block, tile = place(max_blocks, (WIDTH + COLUMNS - 1) // COLUMNS, GROUP)
    if block < tl.load(num_blocks):
        expert = tl.load(blocks + block).to(tl.int64)
        first = tl.load(blocks + max_blocks + block)
        rows = tl.arange(0, ROWS)
        is_real = rows < tl.load(blocks + 2 * max_blocks + block)
        # Rows that are none are computed from row 0 and not stored.
        token = tl.load(pairs + first + rows, mask=is_real, other=0) // NUM_CHOSEN
        x_rows = x + token.to(tl.int64) * DEPTH_SIZE
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < WIDTH
        inside = tl.minimum(column, WIDTH - 1)
        gate_rows = weight_rows(gate_up, expert * (2 * WIDTH) + inside, DEPTH_SIZE, IS_FP4)
        up_rows = weight_rows(gate_up, expert * (2 * WIDTH) + WIDTH + inside, DEPTH_SIZE, IS_FP4)
        gate_scales = scale_rows(scales, expert, inside, 2 * WIDTH, DEPTH_SIZE, IS_FP4)
        up_scales = scale_rows(scales, expert, WIDTH + inside, 2 * WIDTH, DEPTH_SIZE, IS_FP4)
        stride = 2 * WIDTH if IS_FP4 else 1
        dtype: tl.constexpr = x.dtype.element_ty
        gate = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        up = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
        for turn in range(0, (DEPTH_SIZE + _TURN - 1) // _TURN):
            inputs = turn_inputs(x_rows, turn, DEPTH_SIZE, IS_FP4)
            gate = add_turn(
                gate, inputs, gate_rows, gate_scales, turn, stride, dtype, IS_FP4, IS_PACKED
            )
            up = add_turn(up, inputs, up_rows, up_scales, turn, stride, dtype, IS_FP4, IS_PACKED)
        bias_at = bias + expert * (2 * WIDTH) + column
        gate = add_bias(tl.trans(gate), bias_at, is_column, HAS_BIAS)
        up = add_bias(tl.trans(up), bias_at + WIDTH, is_column, HAS_BIAS)
        activated = gated(gate, up, ALPHA, LIMIT, out.dtype.element_ty)
        target = out + (first + rows).to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(target, activated, mask=is_real[:, None] & is_column[None, :])


def _project(  # noqa: PLR0913
    x: tl.tensor,
    down: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    weights: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    out: tl.tensor,
    max_blocks: tl.tensor,
    num_tokens: tl.tensor,
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    IS_FP4: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """weight * (x @ down.T + bias) for the block's rows, at (split, choice, token). Program (place,
    split): a split has some turns of x and down, the first one the bias."""
    begin_dependent(IS_DEPENDENT)
    block, tile = place(max_blocks, (WIDTH + COLUMNS - 1) // COLUMNS, GROUP)
    if block < tl.load(num_blocks):
        expert = tl.load(blocks + block).to(tl.int64)
        first = tl.load(blocks + max_blocks + block)
        rows = tl.arange(0, ROWS)
        is_real = rows < tl.load(blocks + 2 * max_blocks + block)
        pair = tl.load(pairs + first + rows, mask=is_real, other=0)
        x_rows = x + tl.where(is_real, first + rows, 0).to(tl.int64) * DEPTH_SIZE
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < WIDTH
        inside = tl.minimum(column, WIDTH - 1)
        down_rows = weight_rows(down, expert * WIDTH + inside, DEPTH_SIZE, IS_FP4)
        down_scales = scale_rows(scales, expert, inside, WIDTH, DEPTH_SIZE, IS_FP4)
        stride = WIDTH if IS_FP4 else 1
        split = tl.program_id(1)
        total = sum_turns(
            x_rows, down_rows, down_scales, split, stride, x.dtype.element_ty, DEPTH_SIZE,
            COLUMNS, ROWS, NUM_SPLITS, IS_FP4, IS_PACKED,
        )  # fmt: skip
        if NUM_SPLITS == 1:
            is_biased = is_column
        else:
            is_biased = column < tl.where(split == 0, WIDTH, 0)
        product = add_bias(tl.trans(total), bias + expert * WIDTH + column, is_biased, HAS_BIAS)
        product *= tl.load(weights + pair, mask=is_real, other=0.0)[:, None]
        part = pair % NUM_CHOSEN
        if NUM_SPLITS > 1:
            part += split * NUM_CHOSEN
        row = part.to(tl.int64) * num_tokens + pair // NUM_CHOSEN
        target = out + row[:, None] * WIDTH + column[None, :]
        tl.store(
            target, product.to(out.dtype.element_ty), mask=is_real[:, None] & is_column[None, :]
        )


# Numbers that differ from step to step make no kernels of their own.
_activate_kernel = triton.jit(_activate, do_not_specialize=["max_blocks"])
_project_kernel = triton.jit(_project, do_not_specialize=["max_blocks", "num_tokens"])


@dataclass(frozen=True, slots=True)
class KeptTiles:
    """How both products are made. block_rows: of a block of pairs. columns: of the output a program
    makes; num_stages, num_warps: Triton's."""

    block_rows: int
    columns: int
    num_stages: int
    num_warps: int

    def activate(
        self,
        x: torch.Tensor,
        gate_up: Stack,
        grouped: ExpertBlocks,
        num_chosen: int,
        bias: torch.Tensor | None,
        gating: Gating,
    ) -> torch.Tensor:
        """As ExpertTiles.activate."""
        width = gate_up.rows // 2
        out = torch.empty((grouped.pairs.shape[0], width), dtype=x.dtype, device=x.device)
        _activate_kernel[(grouped.max_blocks * triton.cdiv(width, self.columns),)](
            x,
            stored_weights(gate_up),
            gate_up.scales,
            x if bias is None else bias,
            grouped.pairs,
            grouped.blocks,
            grouped.num_blocks,
            out,
            grouped.max_blocks,
            WIDTH=width,
            NUM_CHOSEN=num_chosen,
            HAS_BIAS=bias is not None,
            ALPHA=gating.alpha,
            LIMIT=gating.limit,
            **self.launch_options(x, gate_up),
        )
        return out

    def project(
        self,
        x: torch.Tensor,
        down: Stack,
        weights: torch.Tensor,
        grouped: ExpertBlocks,
        bias: torch.Tensor | None,
        leaves_out: bool,
    ) -> torch.Tensor:
        """As ExpertTiles.project."""
        return self.project_parts(x, down, weights, grouped, bias, leaves_out, 1)

    def project_parts(
        self,
        x: torch.Tensor,
        down: Stack,
        weights: torch.Tensor,
        grouped: ExpertBlocks,
        bias: torch.Tensor | None,
        leaves_out: bool,
        num_splits: int,
    ) -> torch.Tensor:
        """As ExpertTiles.project, in num_splits parts: (num_splits * k, n, hidden_size), whose sum
        over the first dimension it is. Each part is rounded to x's dtype."""
        num_tokens, num_chosen = weights.shape
        make = torch.zeros if leaves_out else torch.empty
        out = make((num_splits * num_chosen, num_tokens, down.rows), dtype=x.dtype, device=x.device)
        num_tiles = triton.cdiv(down.rows, self.columns)
        _project_kernel[(grouped.max_blocks * num_tiles, num_splits)](
            x,
            stored_weights(down),
            down.scales,
            x if bias is None else bias,
            weights,
            grouped.pairs,
            grouped.blocks,
            grouped.num_blocks,
            out,
            grouped.max_blocks,
            num_tokens,
            WIDTH=down.rows,
            NUM_CHOSEN=num_chosen,
            HAS_BIAS=bias is not None,
            NUM_SPLITS=num_splits,
            **self.launch_options(x, down),
        )
        return out

    def launch_options(self, x: torch.Tensor, stack: Stack) -> dict[str, Any]:
        """What both kernels take by name."""
        is_dependent = dependent_launch(x)
        return {
            "DEPTH_SIZE": stack.columns,
            "IS_FP4": isinstance(stack, Fp4Stack),
            "ROWS": self.block_rows,
            "COLUMNS": self.columns,
            "GROUP": _BLOCKS_A_GROUP,
            "IS_PACKED": x.is_cuda,
            "IS_DEPENDENT": is_dependent,
            "num_stages": self.num_stages,
            "num_warps": self.num_warps,
            "launch_pdl": is_dependent,
        }


def stored_weights(stack: Stack) -> torch.Tensor:
    """As both kernels read them: words of 32 bits."""
    return stack.words if isinstance(stack, Fp4Stack) else stack.values.view(torch.int32)
