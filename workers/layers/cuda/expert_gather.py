"""Tokens' rows in the order of their pairs by expert, for products that read blocks of rows, and
these blocks in an order in which programs that take tiles in turns end together."""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.expert_routing import ExpertBlocks
from workers.layers.cuda.launch import begin_dependent, dependent_launch, next_power_of_2

_ROWS, _COLUMNS = 8, 512


def _run_order_blocks(
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    ordered: tl.tensor,
    max_blocks: tl.tensor,
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
) -> None:
    """Blocks by how many steps of STEP rows they have, of at most BLOCK_ROWS, the largest first;
    those of as many in their order."""
    block = tl.arange(0, BLOCKS)
    is_block = block < tl.load(num_blocks)
    num_rows = tl.load(blocks + 2 * max_blocks + block, mask=is_block, other=0)
    steps = (num_rows + STEP - 1) // STEP
    place = block
    num_before = tl.load(num_blocks) * 0
    for fewer in tl.static_range(BLOCK_ROWS // STEP):
        is_next = (is_block & (steps == BLOCK_ROWS // STEP - fewer)).to(tl.int32)
        place = tl.where(is_next != 0, num_before + tl.cumsum(is_next, axis=0) - 1, place)
        num_before += tl.sum(is_next, axis=0)
    for line in tl.static_range(3):
        values = tl.load(blocks + line * max_blocks + block, mask=is_block, other=0)
        tl.store(ordered + line * max_blocks + place, values, mask=is_block)


order_blocks = triton.jit(_run_order_blocks)


def _gather(  # noqa: PLR0913
    x: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    out: tl.tensor,
    ordered: tl.tensor,
    num_placed: tl.tensor,
    max_blocks: tl.tensor,
    WIDTH: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    STEP: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (rows, columns); the first one orders the blocks too. Behind the pairs of blocks may
    lie anything."""
    begin_dependent(IS_DEPENDENT)
    if tl.program_id(0) + tl.program_id(1) == 0:
        order_blocks(blocks, num_blocks, ordered, max_blocks, BLOCK_ROWS, STEP, BLOCKS)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = rows < tl.load(num_placed)
    token = tl.load(pairs + rows, mask=is_row, other=0) // NUM_CHOSEN
    is_cell = is_row[:, None] & (columns < WIDTH)[None, :]
    values = tl.load(x + token.to(tl.int64)[:, None] * WIDTH + columns[None, :], mask=is_cell)
    tl.store(out + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], values, mask=is_cell)


_gather_kernel = triton.jit(_gather, do_not_specialize=["max_blocks"])


def gather_rows(
    x: torch.Tensor, grouped: ExpertBlocks, num_chosen: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """x (n, width), contiguous -> each pair's token's row, (n * num_chosen, width), in the order of
    grouped.pairs, those of other ranks' experts unwritten; and grouped.blocks, those first that
    have the most steps of so many pairs."""
    num_pairs, width = grouped.pairs.shape[0], x.shape[1]
    out = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    ordered = torch.empty_like(grouped.blocks)
    is_dependent = dependent_launch(x)
    _gather_kernel[(triton.cdiv(num_pairs, _ROWS), triton.cdiv(width, _COLUMNS))](
        x,
        grouped.pairs,
        grouped.blocks,
        grouped.num_blocks,
        out,
        ordered,
        grouped.num_placed,
        grouped.max_blocks,
        WIDTH=width,
        NUM_CHOSEN=num_chosen,
        BLOCK_ROWS=grouped.block_rows,
        STEP=step,
        BLOCKS=next_power_of_2(grouped.max_blocks),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return out, ordered
