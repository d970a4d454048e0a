"""Rows of a graph of drafts: what they go on from, and all of its passes, in one launch each."""

import torch
import triton
import triton.language as tl

from workers.graphs.draft_rows import (
    FIRST_PLACES,
    IDS,
    IS_ROW,
    POSITIONS,
    SLOTS,
    DrawnRows,
    PassTensors,
    RowKernels,
)
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


def _go_on(  # noqa: PLR0913
    staged: tl.tensor,
    drafts: tl.tensor,
    sampled: tl.tensor,
    run_lens: tl.tensor,
    table: tl.tensor,
    sampled_stride: tl.tensor,
    table_stride: tl.tensor,
    row_stride: tl.tensor,
    num_drafts: tl.tensor,
    num_places: tl.tensor,
    HAS_LENS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """A program, of one warp: one row. All is read before anything is written: where a place is
    another position's, it comes from what was staged, or from what the table had before."""
    own = staged + tl.program_id(0)
    slot = tl.load(own + _SLOTS * row_stride)
    before = tl.load(own + _POSITIONS * row_stride)
    row = tl.load(own + _IDS * row_stride)
    columns = tl.arange(0, BLOCK)
    if HAS_LENS:
        run_len = tl.load(run_lens + row)
    else:
        is_draft = columns < num_drafts
        draft = tl.load(drafts + row * num_drafts + columns, mask=is_draft, other=0)
        found = tl.load(sampled + row * sampled_stride + columns, mask=is_draft, other=0)
        is_wrong = is_draft & (found.to(tl.int64) != draft)
        run_len = 1 + tl.min(tl.where(is_wrong, columns, num_drafts), 0).to(tl.int64)
    last_id = tl.load(sampled + row * sampled_stride + run_len - 1).to(tl.int64)
    is_place = columns < num_places
    places = own + (_FIRST_PLACES + columns) * row_stride
    brought = tl.load(places, mask=is_place, other=0)
    of_slot = table + slot * table_stride + before
    num_before = num_drafts + 1
    # Positions behind the step before are those that are brought.
    at = run_len + columns
    is_brought = at >= num_before
    already = tl.load(of_slot + at, mask=is_place & ~is_brought, other=0).to(tl.int64)
    shifted = own + (_FIRST_PLACES + at - num_before) * row_stride
    later = tl.load(shifted, mask=is_place & is_brought, other=0)
    tl.debug_barrier()
    tl.store(of_slot + num_before + columns, brought.to(tl.int32), mask=is_place)
    tl.store(places, tl.where(is_brought, later, already), mask=is_place)
    tl.store(own + _POSITIONS * row_stride, before + run_len)
    tl.store(own + _IDS * row_stride, tl.maximum(last_id, 0))


_STEP_VALUES = ("row_stride", "sampled_stride", "num_drafts", "num_places")
_go_on_kernel = triton.jit(
    _go_on,
    do_not_specialize=_STEP_VALUES,
    do_not_specialize_on_alignment=("drafts", "sampled", "run_lens", "table"),
)


def go_on(staged: torch.Tensor, num_rows: int, drawn: DrawnRows, table: torch.Tensor) -> None:
    """workers.graphs.draft_rows.GoOn. Elements of a row lie side by side, but for staged's."""
    num_drafts, num_places = drawn.drafts.shape[1], len(staged) - FIRST_PLACES
    _go_on_kernel[(num_rows,)](
        staged,
        drawn.drafts,
        drawn.sampled,
        staged if drawn.run_lens is None else drawn.run_lens,
        table,
        drawn.sampled.stride(0),
        table.stride(0),
        staged.stride(0),
        num_drafts,
        num_places,
        HAS_LENS=drawn.run_lens is not None,
        BLOCK=next_power_of_2(max(num_drafts, num_places)),
        num_warps=1,
    )


CUDA_ROW_KERNELS = RowKernels(spread_rows, go_on)
