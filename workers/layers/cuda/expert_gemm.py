"""Products with the weights of chosen experts: rows gathered by expert, one launch a product.

The scheme is that of grouped GEMMs over sorted tokens (MegaBlocks, arXiv:2211.15841; the fused MoE
kernels of vLLM and SGLang work alike): a program takes a block of rows of one expert and a tile of
its output. Knows no routing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from workers.layers.cuda.expert_gating import add_bias, add_rows, gated
from workers.layers.cuda.expert_routing import ExpertBlocks
from workers.layers.cuda.launch import begin_dependent, dependent_launch
from workers.layers.routed_experts import SILU, Gating


def _run_two_products(  # noqa: PLR0913
    x_at: tl.tensor,
    gate_at: tl.tensor,
    is_column: tl.tensor,
    depth: tl.tensor,
    UP: tl.constexpr,  # noqa: N803
    DEPTH_SIZE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    DEPTH: tl.constexpr,  # noqa: N803
) -> tl.tuple:
    """x by gate and by up, whose weights are UP elements behind gate's: float32 (ROWS, COLUMNS)."""
    gate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, DEPTH_SIZE, DEPTH):
        is_inner = depth < (DEPTH_SIZE - start if DEPTH_SIZE % DEPTH else DEPTH)
        part = tl.load(x_at + start, mask=is_inner[None, :], other=0.0)
        is_weight = is_column[None, :] & is_inner[:, None]
        gate_part = tl.load(gate_at + start, mask=is_weight, other=0.0)
        up_part = tl.load(gate_at + UP + start, mask=is_weight, other=0.0)
        gate = tl.dot(part, gate_part, gate)
        up = tl.dot(part, up_part, up)
    return gate, up


_two_products = triton.jit(_run_two_products)


def _activate(  # noqa: PLR0913
    x: tl.tensor,
    gate_up: tl.tensor,
    bias: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    out: tl.tensor,
    added: tl.tensor | None,
    slot_of_token: tl.tensor | None,
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
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """The gated x @ gate.T and x @ up.T for the block's rows, at their places by expert.

    added, slot_of_token: AddedRows, or None where nothing is added, compiled without a trace.
    """
    begin_dependent(IS_DEPENDENT)
    block = tl.program_id(0) % max_blocks
    tile = tl.program_id(0) // max_blocks
    if block < tl.load(num_blocks):
        expert = tl.load(blocks + block).to(tl.int64)
        first = tl.load(blocks + max_blocks + block)
        rows = tl.arange(0, ROWS)
        is_real = rows < tl.load(blocks + 2 * max_blocks + block)
        # Rows that are none are computed from row 0 and not stored.
        token = tl.load(pairs + first + rows, mask=is_real, other=0) // NUM_CHOSEN
        lane = tl.arange(0, COLUMNS)
        column = tile * COLUMNS + lane
        is_column = lane < (WIDTH - tile * COLUMNS if WIDTH % COLUMNS else COLUMNS)
        depth = tl.arange(0, DEPTH)
        x_at = x + token.to(tl.int64)[:, None] * DEPTH_SIZE + depth[None, :]
        weight = gate_up + expert * (2 * WIDTH * DEPTH_SIZE)
        gate_at = weight + column[None, :] * DEPTH_SIZE + depth[:, None]
        gate, up = _two_products(
            x_at, gate_at, is_column, depth, WIDTH * DEPTH_SIZE, DEPTH_SIZE, ROWS, COLUMNS, DEPTH
        )
        bias_at = bias + expert * (2 * WIDTH) + column
        gate = add_bias(gate, bias_at, is_column, HAS_BIAS)
        up = add_bias(up, bias_at + WIDTH, is_column, HAS_BIAS)
        if added is not None:
            has_adapter = tl.load(slot_of_token + token, mask=is_real, other=0) > 0
            is_added = has_adapter[:, None] & is_column[None, :]
            at = added + (first + rows).to(tl.int64)[:, None] * (2 * WIDTH) + column[None, :]
            gate, up = add_rows(gate, at, is_added), add_rows(up, at + WIDTH, is_added)
        activated = gated(gate, up, ALPHA, LIMIT, out.dtype.element_ty)
        target = out + (first + rows).to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(target, activated, mask=is_real[:, None] & is_column[None, :])


def _project(  # noqa: PLR0913
    x: tl.tensor,
    down: tl.tensor,
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
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """weight * (x @ down.T + bias) for the block's rows, at (choice, token)."""
    begin_dependent(IS_DEPENDENT)
    block = tl.program_id(0) % max_blocks
    tile = tl.program_id(0) // max_blocks
    if block < tl.load(num_blocks):
        expert = tl.load(blocks + block).to(tl.int64)
        first = tl.load(blocks + max_blocks + block)
        rows = tl.arange(0, ROWS)
        is_real = rows < tl.load(blocks + 2 * max_blocks + block)
        pair = tl.load(pairs + first + rows, mask=is_real, other=0)
        lane = tl.arange(0, COLUMNS)
        column = tile * COLUMNS + lane
        is_column = lane < (WIDTH - tile * COLUMNS if WIDTH % COLUMNS else COLUMNS)
        depth = tl.arange(0, DEPTH)
        x_at = (
            x
            + tl.where(is_real, first + rows, 0).to(tl.int64)[:, None] * DEPTH_SIZE
            + depth[None, :]
        )
        weight_at = down + expert * (WIDTH * DEPTH_SIZE)
        weight_at += column[None, :] * DEPTH_SIZE + depth[:, None]
        product = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for start in range(0, DEPTH_SIZE, DEPTH):
            is_inner = depth < (DEPTH_SIZE - start if DEPTH_SIZE % DEPTH else DEPTH)
            part = tl.load(x_at + start, mask=is_inner[None, :], other=0.0)
            is_weight = is_column[None, :] & is_inner[:, None]
            product = tl.dot(part, tl.load(weight_at + start, mask=is_weight, other=0.0), product)
        product = add_bias(product, bias + expert * WIDTH + column, is_column, HAS_BIAS)
        product *= tl.load(weights + pair, mask=is_real, other=0.0)[:, None]
        row = (pair % NUM_CHOSEN).to(tl.int64) * num_tokens + pair // NUM_CHOSEN
        target = out + row[:, None] * WIDTH + column[None, :]
        tl.store(
            target, product.to(out.dtype.element_ty), mask=is_real[:, None] & is_column[None, :]
        )


# Numbers that differ from step to step make no kernels of their own.
_activate_kernel = triton.jit(_activate, do_not_specialize=["max_blocks"])
_project_kernel = triton.jit(_project, do_not_specialize=["max_blocks", "num_tokens"])


@dataclass(frozen=True, slots=True)
class AddedRows:
    """What is added to gate and up before the gate. rows: of the products' dtype (n * num_chosen,
    2 * width), gate's beside up's, in the order of grouped.pairs; slot_of_token: int32 (n,), 0 for
    tokens whose rows stay as they are, bit for bit: theirs here may be anything."""

    rows: torch.Tensor
    slot_of_token: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """How one of the products is made, by pointers to weights: on every GPU, for every size.

    block_rows: of a block of pairs. columns: of the output a program makes; depth: of the inner
    dimension a turn; num_stages, num_warps: Triton's.
    """

    block_rows: int
    columns: int
    depth: int
    num_stages: int
    num_warps: int

    def activate(
        self,
        x: torch.Tensor,
        gate_up: torch.Tensor,
        grouped: ExpertBlocks,
        num_chosen: int,
        bias: torch.Tensor | None = None,
        gating: Gating = SILU,
    ) -> torch.Tensor:
        """x (n, hidden_size), gate_up (experts, 2 * width, hidden_size), bias (experts, 2 * width),
        gate over up -> (n * num_chosen, width) in the order of grouped.pairs. All contiguous."""
        return activate_by_pointers(self, x, gate_up, grouped, num_chosen, bias, gating)

    def project(
        self,
        x: torch.Tensor,
        down: torch.Tensor,
        weights: torch.Tensor,
        grouped: ExpertBlocks,
        bias: torch.Tensor | None = None,
        leaves_out: bool = False,
    ) -> torch.Tensor:
        """x: of activate; down (experts, hidden_size, width), bias (experts, hidden_size); weights
        float32 (n, num_chosen) -> (num_chosen, n, hidden_size), whose sum over choices is the
        layer's output. leaves_out: whether some pairs are in no block; they add nothing."""
        num_tokens, num_chosen = weights.shape
        _, width, depth = down.shape
        make = torch.zeros if leaves_out else torch.empty
        out = make((num_chosen, num_tokens, width), dtype=x.dtype, device=x.device)
        _project_kernel[(grouped.max_blocks * triton.cdiv(width, self.columns),)](
            x,
            down,
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

    def _launch(self, x: torch.Tensor, depth: int, width: int) -> dict[str, Any]:
        """What both kernels take by name."""
        is_dependent = dependent_launch(x)
        return {
            "DEPTH_SIZE": depth,
            "WIDTH": width,
            "ROWS": self.block_rows,
            "COLUMNS": self.columns,
            "DEPTH": self.depth,
            "IS_DEPENDENT": is_dependent,
            "num_stages": self.num_stages,
            "num_warps": self.num_warps,
            "launch_pdl": is_dependent,
        }


def activate_by_pointers(
    tiles: ExpertTiles,
    x: torch.Tensor,
    gate_up: torch.Tensor,
    grouped: ExpertBlocks,
    num_chosen: int,
    bias: torch.Tensor | None,
    gating: Gating,
    added: AddedRows | None = None,
) -> torch.Tensor:
    """What ExpertTiles.activate says. tiles: no others than ExpertTiles."""
    width, depth = gate_up.shape[1] // 2, gate_up.shape[2]
    out = torch.empty((grouped.pairs.shape[0], width), dtype=x.dtype, device=x.device)
    _activate_kernel[(grouped.max_blocks * triton.cdiv(width, tiles.columns),)](
        x,
        gate_up,
        gate_up if bias is None else bias,
        grouped.pairs,
        grouped.blocks,
        grouped.num_blocks,
        out,
        None if added is None else added.rows,
        None if added is None else added.slot_of_token,
        grouped.max_blocks,
        NUM_CHOSEN=num_chosen,
        HAS_BIAS=bias is not None,
        ALPHA=gating.alpha,
        LIMIT=gating.limit,
        **tiles._launch(x, depth, width),
    )
    return out
