"""Products with the weights of chosen experts whose tiles the copy engine brings, from sm90 on.

As expert_gemm.py, which says what is computed. Weights lie as one matrix of all experts' rows, so
that a tile's last columns may be the next expert's rows: they are computed and not stored. What is
beyond the matrix, a row's end included, comes as zeros. Source of the mechanism: CUDA programming
guide, "Tensor Memory Access".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from workers.layers.cuda.expert_dots import (
    multiplied,
    no_total,
    two_products,
)
from workers.layers.cuda.expert_gating import add_bias, gated, place
from workers.layers.cuda.expert_gemm import ExpertTiles
from workers.layers.cuda.expert_routing import ExpertBlocks
from workers.layers.cuda.launch import begin_dependent
from workers.layers.routed_experts import SILU, Gating

_ALIGNED_ITEMS = 8
"""Of 16 bits: the copy engine's rows begin at multiples of 16 bytes."""


def _activate(  # noqa: PLR0913
    x: tl.tensor,
    weight_map: tl.tensor,
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
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    IS_SWAPPED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    begin_dependent(IS_DEPENDENT)
    block, tile = place(max_blocks, tl.cdiv(WIDTH, COLUMNS), GROUP)
    if block < tl.load(num_blocks):
        expert = tl.load(blocks + block)
        first = tl.load(blocks + max_blocks + block)
        rows = tl.arange(0, ROWS)
        is_real = rows < tl.load(blocks + 2 * max_blocks + block)
        # Rows that are none are computed from row 0 and not stored.
        token = tl.load(pairs + first + rows, mask=is_real, other=0) // NUM_CHOSEN
        x_at = x + token.to(tl.int64)[:, None] * DEPTH_SIZE + tl.arange(0, DEPTH)[None, :]
        gate, up = two_products(
            x_at, weight_map, expert, tile, DEPTH_SIZE, WIDTH, ROWS, COLUMNS, DEPTH, IS_SWAPPED
        )
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < WIDTH
        bias_at = bias + expert.to(tl.int64) * (2 * WIDTH) + column
        gate = add_bias(gate, bias_at, is_column, HAS_BIAS)
        up = add_bias(up, bias_at + WIDTH, is_column, HAS_BIAS)
        activated = gated(gate, up, ALPHA, LIMIT, out.dtype.element_ty)
        target = out + (first + rows).to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(target, activated, mask=is_real[:, None] & is_column[None, :])


def _project(  # noqa: PLR0913
    x_map: tl.tensor,
    weight_map: tl.tensor,
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
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
    GROUP: tl.constexpr,  # noqa: N803
    IS_SWAPPED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """A block's rows lie one behind the other; those behind its last one are computed and not
    stored, whosesoever they are."""
    begin_dependent(IS_DEPENDENT)
    block, tile = place(max_blocks, tl.cdiv(WIDTH, COLUMNS), GROUP)
    if block < tl.load(num_blocks):
        expert = tl.load(blocks + block)
        first = tl.load(blocks + max_blocks + block)
        row = expert * WIDTH + tile * COLUMNS
        product = no_total(ROWS, COLUMNS, IS_SWAPPED)
        for start in range(0, DEPTH_SIZE, DEPTH):
            part = x_map.load([first, start])
            product = multiplied(part, weight_map.load([row, start]), product, IS_SWAPPED)
        if IS_SWAPPED:
            product = tl.trans(product)
        rows = tl.arange(0, ROWS)
        is_real = rows < tl.load(blocks + 2 * max_blocks + block)
        pair = tl.load(pairs + first + rows, mask=is_real, other=0)
        column = tile * COLUMNS + tl.arange(0, COLUMNS)
        is_column = column < WIDTH
        bias_at = bias + expert.to(tl.int64) * WIDTH + column
        product = add_bias(product, bias_at, is_column, HAS_BIAS)
        product *= tl.load(weights + pair, mask=is_real, other=0.0)[:, None]
        to = (pair % NUM_CHOSEN).to(tl.int64) * num_tokens + pair // NUM_CHOSEN
        target = out + to[:, None] * WIDTH + column[None, :]
        tl.store(
            target, product.to(out.dtype.element_ty), mask=is_real[:, None] & is_column[None, :]
        )


# Numbers that differ from step to step make no kernels of their own.
_activate_kernel = triton.jit(_activate, do_not_specialize=["max_blocks"])
_project_kernel = triton.jit(_project, do_not_specialize=["max_blocks", "num_tokens"])


def has_maps(hidden_size: int, width: int) -> bool:
    """Whether experts of these sizes, in 16 bits, can be brought by tensor maps."""
    return hidden_size % _ALIGNED_ITEMS == 0 and width % _ALIGNED_ITEMS == 0


@dataclass(frozen=True, slots=True)
class MappedTiles(ExpertTiles):
    """ExpertTiles by tensor maps: needs a GPU with a copy engine and sizes that has_maps.

    group: blocks that take a tile of weights one after the other, so that both stay in L2.
    is_swapped: columns stand for the rows of the tensor cores' instruction, 64 at least, and a
    block's rows for its columns, 16 at least: for blocks of few rows.
    """

    group: int
    is_swapped: bool

    def activate(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        grouped: ExpertBlocks,
        num_chosen: int,
        bias: torch.Tensor | None = None,
        gating: Gating = SILU,
    ) -> torch.Tensor:
        width, depth = gate_up.shape[1] // 2, gate_up.shape[2]
        out = torch.empty((grouped.pairs.shape[0], width), dtype=x.dtype, device=x.device)
        _activate_kernel[(grouped.max_blocks * triton.cdiv(width, self.columns),)](
            x,
            self._map(gate_up, self.columns),
            gate_up if bias is None else bias,
            grouped.pairs,
            grouped.blocks,
            grouped.num_blocks,
            out,
            grouped.max_blocks,
            NUM_CHOSEN=num_chosen,
            HAS_BIAS=bias is not None,
            ALPHA=gating.alpha,
            LIMIT=gating.limit,
            **self._launch(x, depth, width),
        )
        return out

    def project(
        self,
        x: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        grouped: ExpertBlocks,
        bias: torch.Tensor | None = None,
        leaves_out: bool = False,
    ) -> torch.Tensor:
        num_tokens, num_chosen = weights.shape
        _, width, depth = down.shape
        make = torch.zeros if leaves_out else torch.empty
        out = make((num_chosen, num_tokens, width), dtype=x.dtype, device=x.device)
        _project_kernel[(grouped.max_blocks * triton.cdiv(width, self.columns),)](
            self._map(x, self.block_rows),
            self._map(down, self.columns),
            down if bias is None else bias,
            weights,
            grouped.pairs,
            grouped.blocks,
            grouped.num_blocks,
            out,
            grouped.max_blocks,
            num_tokens,
            NUM_CHOSEN=num_chosen,
            HAS_BIAS=bias is not None,
            **self._launch(x, depth, width),
        )
        return out

    def _map(self, matrices: torch.Tensor, num_rows: int) -> TensorDescriptor:
        """Of (..., depth) as one matrix, num_rows at a time."""
        matrix = matrices.view(-1, matrices.shape[-1])
        return TensorDescriptor.from_tensor(matrix, [num_rows, self.depth])

    def _launch(self, x: torch.Tensor, depth: int, width: int) -> dict[str, Any]:
        # Not super(): a dataclass with slots is another class than the one of this body.
        launch = ExpertTiles._launch(self, x, depth, width)
        return {**launch, "GROUP": self.group, "IS_SWAPPED": self.is_swapped}
