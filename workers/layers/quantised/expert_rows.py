"""Rows of experts in FP8: rounded once and laid out by expert, and what the gate leaves of them.

For products that take an expert's rows one behind the other, as copy engines and libraries do:
pairs of a token and a choice lie by expert, and a token's row is written to the places of all its
pairs. Knows no product.
"""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.expert_gating import gated
from workers.layers.cuda.expert_routing import (
    Chosen,
    ExpertBlocks,
    max_blocks_of,
    write_blocks,
)
from workers.layers.cuda.launch import begin_dependent, dependent_launch, next_power_of_2
from workers.layers.kept.fp8 import BLOCK
from workers.layers.quantised.fp8_rounding import Rounded, to_fp8
from workers.layers.routed_experts import Gating

_BLOCK = tl.constexpr(BLOCK)
_GATED_ROWS = 16
_SUMMED_COLUMNS = 1024


def _place_rows(  # noqa: PLR0913
    x: tl.tensor,
    ids: tl.tensor,
    ranks: tl.tensor,
    counts: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    max_blocks: tl.tensor,
    row_stride: tl.tensor,
    group_stride: tl.tensor,
    NUM_COLUMNS: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    NUM_HERE: tl.constexpr,  # noqa: N803
    EXPERTS: tl.constexpr,  # noqa: N803
    GROUPS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (token, GROUPS of its groups); the first one writes the blocks too. Strides are of
    scales."""
    begin_dependent(IS_DEPENDENT)
    experts = tl.arange(0, EXPERTS)
    count = tl.load(counts + experts, mask=experts < NUM_EXPERTS, other=0)
    before = tl.cumsum(count, axis=0) - count
    token, part = tl.program_id(0), tl.program_id(1)
    if token + part == 0:
        write_blocks(count, before, blocks, num_blocks, max_blocks, NUM_HERE, EXPERTS, ROWS)
    groups = part * GROUPS + tl.arange(0, GROUPS)
    columns = groups[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    is_group = groups < NUM_COLUMNS // _BLOCK
    at = x + token.to(tl.int64) * NUM_COLUMNS + columns
    row = tl.load(at, mask=is_group[:, None], other=0.0).to(tl.float32)
    rounded, scale = to_fp8(row, values.dtype.element_ty)
    for choice in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + choice
        expert = tl.load(ids + pair)
        first = tl.sum(tl.where(experts == expert, before, 0), axis=0)
        place = (first + tl.load(ranks + pair)).to(tl.int64)
        tl.store(pairs + place, pair, mask=part == 0)
        # Rows of other ranks' experts are not written.
        is_own = groups < tl.where(expert < NUM_HERE, NUM_COLUMNS // _BLOCK, 0)
        tl.store(values + place * NUM_COLUMNS + columns, rounded, mask=is_own[:, None])
        tl.store(scales + place * row_stride + groups * group_stride, scale, mask=is_own)


_STEP_VALUES = ("max_blocks", "row_stride", "group_stride")
_place_rows_kernel = triton.jit(_place_rows, do_not_specialize=_STEP_VALUES)


def place_rows(
    x: torch.Tensor, chosen: Chosen, block_rows: int, num_here: int, by_row: bool
) -> tuple[Rounded, ExpertBlocks]:
    """x (n, columns), contiguous, columns a multiple of 128 -> values (n * k, columns), scales
    (n * k, columns / 128), by expert, and what group makes of the pairs. by_row: whether a row's
    scales lie together or a group's. num_here: experts of this rank, the first ones; rows of others
    are not written."""
    num_tokens, num_columns = x.shape
    num_chosen, num_groups = chosen.ids.shape[1], num_columns // BLOCK
    num_pairs, num_experts = num_tokens * num_chosen, chosen.counts.shape[0]
    values = torch.empty((num_pairs, num_columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = _scales(num_pairs, num_groups, by_row, x.device)
    max_blocks = max_blocks_of(num_pairs, num_experts, block_rows)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    blocks = torch.empty((3, max_blocks), dtype=torch.int32, device=x.device)
    num_blocks = torch.empty(1, dtype=torch.int32, device=x.device)
    groups = min(16, next_power_of_2(num_groups))
    is_dependent = dependent_launch(x)
    _place_rows_kernel[(num_tokens, triton.cdiv(num_groups, groups))](
        x,
        chosen.ids,
        chosen.ranks,
        chosen.counts,
        values,
        scales,
        pairs,
        blocks,
        num_blocks,
        max_blocks,
        *scales.stride(),
        NUM_COLUMNS=num_columns,
        NUM_CHOSEN=num_chosen,
        NUM_EXPERTS=num_experts,
        NUM_HERE=num_here,
        EXPERTS=next_power_of_2(num_experts),
        GROUPS=groups,
        ROWS=block_rows,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    grouped = ExpertBlocks(pairs, blocks, num_blocks, block_rows, num_blocks[:0])
    return Rounded(values, scales), grouped


def _gate_rows(  # noqa: PLR0913
    gate_up: tl.tensor,
    first_rows: tl.tensor,
    values: tl.tensor,
    scales: tl.tensor,
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    WIDTH: tl.constexpr,  # noqa: N803
    ALPHA: tl.constexpr,  # noqa: N803
    LIMIT: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (group, block of rows): a row's scales lie together."""
    begin_dependent(IS_DEPENDENT)
    group = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < tl.load(first_rows + NUM_EXPERTS)
    row = row.to(tl.int64)
    columns = group * _BLOCK + tl.arange(0, _BLOCK)
    at = gate_up + row[:, None] * (2 * WIDTH) + columns[None, :]
    gate = tl.load(at, mask=is_row[:, None], other=0.0).to(tl.float32)
    up = tl.load(at + WIDTH, mask=is_row[:, None], other=0.0).to(tl.float32)
    activated = gated(gate, up, ALPHA, LIMIT, gate_up.dtype.element_ty).to(tl.float32)
    rounded, scale = to_fp8(activated, values.dtype.element_ty)
    to = values + row[:, None] * WIDTH + columns[None, :]
    tl.store(to, rounded, mask=is_row[:, None])
    tl.store(scales + row * (WIDTH // _BLOCK) + group, scale, mask=is_row)


_gate_rows_kernel = triton.jit(_gate_rows)


def gate_rows(gate_up: torch.Tensor, first_rows: torch.Tensor, gating: Gating) -> Rounded:
    """gate_up (rows, 2 * width), gate over up, width a multiple of 128 -> values (rows, width),
    scales (rows, width / 128), a row's together. first_rows: int32 (experts + 1,), where each
    expert's begin and where the last one's end."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    values = torch.empty((num_rows, width), dtype=torch.float8_e4m3fn, device=gate_up.device)
    scales = _scales(num_rows, width // BLOCK, True, gate_up.device)
    is_dependent = dependent_launch(gate_up)
    _gate_rows_kernel[(width // BLOCK, triton.cdiv(num_rows, _GATED_ROWS))](
        gate_up,
        first_rows,
        values,
        scales,
        NUM_EXPERTS=first_rows.shape[0] - 1,
        WIDTH=width,
        ALPHA=gating.alpha,
        LIMIT=gating.limit,
        ROWS=_GATED_ROWS,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return Rounded(values, scales)


def _sum_rows(  # noqa: PLR0913
    rows: tl.tensor,
    ids: tl.tensor,
    ranks: tl.tensor,
    weights: tl.tensor,
    first_rows: tl.tensor,
    out: tl.tensor,
    NUM_COLUMNS: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Program (token, COLUMNS of its columns)."""
    begin_dependent(IS_DEPENDENT)
    token = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < NUM_COLUMNS
    total = tl.zeros((COLUMNS,), dtype=tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        pair = token * NUM_CHOSEN + choice
        expert = tl.load(ids + pair)
        # Rows of other ranks' experts were not made: whatever lies there is not read.
        num_here = tl.where(expert < NUM_EXPERTS, NUM_COLUMNS, 0)
        first = tl.load(first_rows + tl.minimum(expert, NUM_EXPERTS))
        place = (first + tl.load(ranks + pair)).to(tl.int64)
        row = tl.load(rows + place * NUM_COLUMNS + columns, mask=columns < num_here, other=0.0)
        total += row.to(tl.float32) * tl.load(weights + pair)
    to = out + token.to(tl.int64) * NUM_COLUMNS + columns
    tl.store(to, total.to(out.dtype.element_ty), mask=is_column)


_sum_rows_kernel = triton.jit(_sum_rows)


def sum_rows(rows: torch.Tensor, chosen: Chosen, first_rows: torch.Tensor) -> torch.Tensor:
    """rows (n * k, columns) by expert -> (n, columns): each token's, times its choices' weights,
    added up in float32. first_rows: as gate_rows. What other ranks' experts make is left out."""
    num_tokens, num_chosen = chosen.ids.shape
    num_columns = rows.shape[1]
    out = torch.empty((num_tokens, num_columns), dtype=rows.dtype, device=rows.device)
    is_dependent = dependent_launch(rows)
    columns = min(_SUMMED_COLUMNS, next_power_of_2(num_columns))
    _sum_rows_kernel[(num_tokens, triton.cdiv(num_columns, columns))](
        rows,
        chosen.ids,
        chosen.ranks,
        chosen.weights,
        first_rows,
        out,
        NUM_COLUMNS=num_columns,
        NUM_CHOSEN=num_chosen,
        NUM_EXPERTS=first_rows.shape[0] - 1,
        COLUMNS=columns,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return out


def _scales(num_rows: int, num_groups: int, by_row: bool, device: torch.device) -> torch.Tensor:
    """float32 (num_rows, num_groups)."""
    if by_row:
        return torch.empty((num_rows, num_groups), device=device)
    return torch.empty((num_groups, num_rows), device=device).t()
