"""Tokens' rows in the order of their pairs by expert, for products that read blocks of rows."""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch

_ROWS, _COLUMNS = 8, 512


def _gather(  # noqa: PLR0913
    x: tl.tensor,
    pairs: tl.tensor,
    out: tl.tensor,
    num_pairs: tl.tensor,
    WIDTH: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (rows, columns)."""
    begin_dependent(IS_DEPENDENT)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_row = rows < num_pairs
    token = tl.load(pairs + rows, mask=is_row, other=0) // NUM_CHOSEN
    is_cell = is_row[:, None] & (columns < WIDTH)[None, :]
    values = tl.load(x + token.to(tl.int64)[:, None] * WIDTH + columns[None, :], mask=is_cell)
    tl.store(out + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], values, mask=is_cell)


_gather_kernel = triton.jit(_gather, do_not_specialize=["num_pairs"])


def gathered_rows(x: torch.Tensor, pairs: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """x (n, width), contiguous, and pairs int32 (n * num_chosen,) as ExpertBlocks has them ->
    (n * num_chosen, width): each pair's token's row."""
    num_pairs, width = pairs.shape[0], x.shape[1]
    out = torch.empty((num_pairs, width), dtype=x.dtype, device=x.device)
    is_dependent = dependent_launch(x)
    _gather_kernel[(triton.cdiv(num_pairs, _ROWS), triton.cdiv(width, _COLUMNS))](
        x,
        pairs,
        out,
        num_pairs,
        WIDTH=width,
        NUM_CHOSEN=num_chosen,
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return out
