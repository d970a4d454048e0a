"""Products with the kept weights of chosen experts for few rows, where there are fewer tiles than a
GPU keeps busy: their turns are shared out among programs (split-K). Knows no routing.

A tile's sums of gate and up need all turns before the gate: every program hands its own in as
float32, and the one that comes last adds them up in the order of the splits, so that bits are those
of any order of arrival. What is projected stays in parts, which whoever reads them adds up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.layers.cuda.expert_gating import add_bias, gated, place
from workers.layers.cuda.expert_routing import ExpertBlocks
from workers.layers.cuda.launch import begin_dependent
from workers.layers.kept.experts import Stack
from workers.layers.quantised.expert_gemm import KeptTiles, stored_weights
from workers.layers.quantised.expert_turns import scale_rows, sum_turns, weight_rows
from workers.layers.routed_experts import Gating


def _run_hand_in(
    total: tl.tensor,
    partials: tl.tensor,
    counter: tl.tensor,
    split_stride: tl.tensor,
    split: tl.tensor,
    mask: tl.tensor,
    NUM_SPLITS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """Whether all of the tile's splits are in. partials: pointers, as total, into split 0's.

    Adding to the counter releases this program's sums and acquires those of the programs that came
    before.
    """
    tl.store(partials + split * split_stride, total, mask=mask)
    # All threads' stores come before the one thread's addition.
    tl.debug_barrier()
    return tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == NUM_SPLITS - 1


hand_in = triton.jit(_run_hand_in)


def _run_joined(
    partials: tl.tensor,
    split_stride: tl.tensor,
    mask: tl.tensor,
    NUM_SPLITS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """The sum of all splits, in their order. partials: pointers into split 0's."""
    total = tl.load(partials, mask=mask, other=0.0, cache_modifier=".cg")
    for split in tl.static_range(1, NUM_SPLITS):
        here = partials + split * split_stride
        total += tl.load(here, mask=mask, other=0.0, cache_modifier=".cg")
    return total


joined = triton.jit(_run_joined)


def _run_halves(
    total: tl.tensor,
    COLUMNS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """float32 (2 * COLUMNS, ROWS), gate's over up's -> both (ROWS, COLUMNS)."""
    return tl.split(tl.permute(tl.reshape(total, (2, COLUMNS, ROWS)), (2, 1, 0)))


halves = triton.jit(_run_halves)


def _run_store_gated(  # noqa: PLR0913
    target: tl.tensor,
    gate: tl.tensor,
    up: tl.tensor,
    bias_at: tl.tensor,
    column: tl.tensor,
    is_cell: tl.tensor,
    WIDTH: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    ALPHA: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
) -> None:
    """target: pointers (rows, columns); bias_at: (columns,) to gate's, up's are WIDTH behind."""
    is_column = column < WIDTH
    gate = add_bias(gate, bias_at, is_column, HAS_BIAS)
    up = add_bias(up, bias_at + WIDTH, is_column, HAS_BIAS)
    dtype: tl.constexpr = target.dtype.element_ty
    tl.store(target, gated(gate, up, ALPHA, LIMIT, dtype), mask=is_cell)


store_gated = triton.jit(_run_store_gated)


def _run_finish(  # noqa: PLR0913
    total: tl.tensor,
    partials: tl.tensor,
    counter: tl.tensor,
    bias: tl.tensor,
    out: tl.tensor,
    at: tl.tensor,
    is_real: tl.tensor,
    first_column: tl.tensor,
    split: tl.tensor,
    num_pairs: tl.tensor,
    WIDTH: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    ALPHA: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    NUM_SPLITS: tl.constexpr,  # noqa: N803
) -> None:
    """A split's sums (2 * COLUMNS, ROWS), gate's over up's, to out if they are the tile's last.

    bias: the expert's. at: int64 (ROWS,), rows' places by expert. partials: float32 (NUM_SPLITS,
    num_pairs, 2 * WIDTH).
    """
    column = first_column + tl.arange(0, COLUMNS)
    is_cell = is_real[:, None] & (column < WIDTH)[None, :]
    target = out + at[:, None] * WIDTH + column[None, :]
    if NUM_SPLITS == 1:
        gate, up = halves(total, COLUMNS, ROWS)
        store_gated(target, gate, up, bias + column, column, is_cell, WIDTH, HAS_BIAS, ALPHA, LIMIT)
    else:
        split_stride = num_pairs.to(tl.int64) * (2 * WIDTH)
        lane = tl.arange(0, 2 * COLUMNS)
        both = first_column + lane % COLUMNS
        own = partials + at[None, :] * (2 * WIDTH) + (both + lane // COLUMNS * WIDTH)[:, None]
        is_own = (both < WIDTH)[:, None] & is_real[None, :]
        if hand_in(total, own, counter, split_stride, split, is_own, NUM_SPLITS):
            whole = partials + at[:, None] * (2 * WIDTH) + column[None, :]
            gate = joined(whole, split_stride, is_cell, NUM_SPLITS)
            up = joined(whole + WIDTH, split_stride, is_cell, NUM_SPLITS)
            store_gated(
                target, gate, up, bias + column, column, is_cell, WIDTH, HAS_BIAS, ALPHA, LIMIT
            )


finish = triton.jit(_run_finish)


def _activate_split(  # noqa: PLR0913
    x: tl.tensor,
    gate_up: tl.tensor,
    scales: tl.tensor,
    bias: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    out: tl.tensor,
    max_blocks: tl.tensor,
    num_pairs: tl.tensor,
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
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    IS_PACKED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """The gated x @ gate.T and x @ up.T for the block's rows, at their places by expert. Program
    (place, split). Gate's and up's columns are one product's: half as many are waited for."""
    begin_dependent(IS_DEPENDENT)
    NUM_TILES: tl.constexpr = (WIDTH + COLUMNS - 1) // COLUMNS  # noqa: N806
    block, tile = place(max_blocks, NUM_TILES, GROUP)
    if block < tl.load(num_blocks):
        split = tl.program_id(1)
        expert = tl.load(blocks + block).to(tl.int64)
        first = tl.load(blocks + max_blocks + block)
        rows = tl.arange(0, ROWS)
        is_real = rows < tl.load(blocks + 2 * max_blocks + block)
        # Rows that are none are computed from row 0 and not stored.
        token = tl.load(pairs + first + rows, mask=is_real, other=0) // NUM_CHOSEN
        x_rows = x + token.to(tl.int64) * DEPTH_SIZE
        lane = tl.arange(0, 2 * COLUMNS)
        inside = tl.minimum(tile * COLUMNS + lane % COLUMNS, WIDTH - 1) + lane // COLUMNS * WIDTH
        weights = weight_rows(gate_up, expert * (2 * WIDTH) + inside, DEPTH_SIZE, IS_FP4)
        weight_scales = scale_rows(scales, expert, inside, 2 * WIDTH, DEPTH_SIZE, IS_FP4)
        stride = 2 * WIDTH if IS_FP4 else 1
        total = sum_turns(
            x_rows, weights, weight_scales, split, stride, x.dtype.element_ty, DEPTH_SIZE,
            2 * COLUMNS, ROWS, NUM_SPLITS, IS_FP4, IS_PACKED,
        )  # fmt: skip
        finish(
            total, partials, counters + block * NUM_TILES + tile, bias + expert * (2 * WIDTH), out,
            (first + rows).to(tl.int64), is_real, tile * COLUMNS, split, num_pairs,
            WIDTH, HAS_BIAS, ALPHA, LIMIT, ROWS, COLUMNS, NUM_SPLITS,
        )  # fmt: skip


# Numbers that differ from step to step make no kernels of their own.
_activate_kernel = triton.jit(_activate_split, do_not_specialize=["max_blocks", "num_pairs"])


@dataclass(frozen=True, slots=True)
class SplitShape:
    """How one of both products is made. columns: of the output a program makes, of gate and of up
    each; num_splits: programs that share a tile's turns out, at most; num_stages, num_warps:
    Triton's."""

    columns: int
    num_splits: int
    num_stages: int
    num_warps: int

    def splits_of(self, stack: Stack) -> int:
        """Every split has a turn at least."""
        return min(self.num_splits, stack.num_turns)


@dataclass(frozen=True, slots=True)
class SplitTiles:
    """How both products are made. block_rows: of a block of pairs."""

    block_rows: int
    gate_up: SplitShape
    down: SplitShape

    def counters_a_block(self, gate_up: Stack) -> int:
        """How many counters activate takes of a block: as ExpertBlocks has them."""
        if self.gate_up.splits_of(gate_up) == 1:
            return 0
        return -(-(gate_up.rows // 2) // self.gate_up.columns)

    def activate(
        self,
        x: torch.Tensor,
        gate_up: Stack,
        grouped: ExpertBlocks,
        num_chosen: int,
        bias: torch.Tensor | None,
        gating: Gating,
    ) -> torch.Tensor:
        """As ExpertTiles.activate. grouped: with its counters at zero."""
        width, num_pairs = gate_up.rows // 2, grouped.pairs.shape[0]
        num_splits = self.gate_up.splits_of(gate_up)
        out = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
        partials = out
        if num_splits > 1:
            size = num_splits, num_pairs, 2 * width
            partials = torch.empty(size, dtype=torch.float32, device=x.device)
        num_tiles = triton.cdiv(width, self.gate_up.columns)
        _activate_kernel[(grouped.max_blocks * num_tiles, num_splits)](
            x,
            stored_weights(gate_up),
            gate_up.scales,
            x if bias is None else bias,
            grouped.pairs,
            grouped.blocks,
            grouped.num_blocks,
            partials,
            grouped.counters,
            out,
            grouped.max_blocks,
            num_pairs,
            WIDTH=width,
            NUM_CHOSEN=num_chosen,
            HAS_BIAS=bias is not None,
            ALPHA=gating.alpha,
            LIMIT=gating.limit,
            NUM_SPLITS=num_splits,
            **self.tiles_of(self.gate_up).launch_options(x, gate_up),
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
        """As KeptTiles.project_parts."""
        num_splits = self.down.splits_of(down)
        return self.tiles_of(self.down).project_parts(
            x, down, weights, grouped, bias, leaves_out, num_splits
        )

    def tiles_of(self, shape: SplitShape) -> KeptTiles:
        return KeptTiles(self.block_rows, shape.columns, shape.num_stages, shape.num_warps)
