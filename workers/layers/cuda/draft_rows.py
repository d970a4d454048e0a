"""All passes of a graph of drafts from its staged rows, in one launch."""

import torch
import triton
import triton.language as tl

from workers.graphs.draft_rows import FIRST_PLACES, IDS, IS_ROW, POSITIONS, SLOTS, PassTensors
from workers.layers.cuda.launch import next_power_of_2

_SLOTS = tl.constexpr(SLOTS)
_POSITIONS = tl.constexpr(POSITIONS)
_IS_ROW = tl.constexpr(IS_ROW)
_IDS = tl.constexpr(IDS)
_FIRST_PLACES = tl.constexpr(FIRST_PLACES)


def _spread_rows(  # noqa: PLR0913
    staged: tl.tensor,
    ids: tl.tensor,
    positions: tl.tensor,
    places: tl.tensor,
    prefix_lens: tl.tensor,
    seq_lens: tl.tensor,
    table: tl.tensor,
    pass_stride: tl.tensor,
    table_stride: tl.tensor,
    num_rows: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """A program: one pass of all rows."""
    number = tl.program_id(0)
    rows = tl.arange(0, BLOCK)
    is_real = rows < num_rows
    slot = tl.load(staged + _SLOTS * num_rows + rows, mask=is_real, other=0)
    first = tl.load(staged + _POSITIONS * num_rows + rows, mask=is_real, other=0)
    is_row = tl.load(staged + _IS_ROW * num_rows + rows, mask=is_real, other=0)
    place = tl.load(staged + (_FIRST_PLACES + number) * num_rows + rows, mask=is_real, other=0)
    if number == 0:
        tl.store(ids + rows, tl.load(staged + _IDS * num_rows + rows, mask=is_real), mask=is_real)
    own = first + number * is_row
    at = number * pass_stride + rows
    tl.store(positions + at, own, mask=is_real)
    tl.store(places + at, place, mask=is_real)
    tl.store(prefix_lens + at, own.to(tl.int32), mask=is_real)
    tl.store(seq_lens + at, (own + is_row).to(tl.int32), mask=is_real)
    tl.store(table + slot * table_stride + first + number, place.to(tl.int32), mask=is_real)


_spread_rows_kernel = triton.jit(
    _spread_rows,
    do_not_specialize=("num_rows", "pass_stride"),
    do_not_specialize_on_alignment=("table",),
)


def spread_rows(staged: torch.Tensor, passes: PassTensors, table: torch.Tensor) -> None:
    """workers.graphs.draft_rows.SpreadRows. Contiguous but for the rows of passes, which lie the
    same way in all of its tensors, and of the table."""
    num_passes, num_rows = passes.positions.shape
    _spread_rows_kernel[(num_passes,)](
        staged,
        passes.ids,
        passes.positions,
        passes.places,
        passes.prefix_lens,
        passes.seq_lens,
        table,
        passes.positions.stride(0),
        table.stride(0),
        num_rows,
        BLOCK=next_power_of_2(num_rows),
        num_warps=4,
    )
