"""Rows of experts in FP8: rounded once and laid out by expert.

For products that take an expert's rows one behind the other, as copy engines do:
pairs of a token and a choice lie by expert, and a token's row is written to the places of all its
pairs. Knows no product.
"""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.expert_routing import (
    Chosen,
    ExpertBlocks,
    max_blocks_of,
    write_blocks,
)
from workers.layers.cuda.launch import begin_dependent, dependent_launch, next_power_of_2
from workers.layers.kept.fp8 import BLOCK
from workers.layers.quantised.fp8_rounding import Rounded, to_fp8

_BLOCK = tl.constexpr(BLOCK)


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
    x: torch.Tensor, chosen: Chosen, block_rows: int, num_here: int
) -> tuple[Rounded, ExpertBlocks]:
    """x (n, columns), contiguous, columns a multiple of 128 -> values (n * k, columns), scales
    (n * k, columns / 128), by expert, a group's scales together, and what group makes of
    the pairs. num_here: experts of this rank, the first ones; rows of others
    are not written."""
    num_tokens, num_columns = x.shape
    num_chosen, num_groups = chosen.ids.shape[1], num_columns // BLOCK
    num_pairs, num_experts = num_tokens * num_chosen, chosen.counts.shape[0]
    values = torch.empty((num_pairs, num_columns), dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((num_groups, num_pairs), device=x.device).t()
    max_blocks = max_blocks_of(num_pairs, num_experts, block_rows)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=x.device)
    blocks = torch.empty((3, max_blocks), dtype=torch.int32, device=x.device)
    sizes = torch.empty(2, dtype=torch.int32, device=x.device)
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
        sizes,
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
    grouped = ExpertBlocks(pairs, blocks, sizes[:1], sizes[1:], block_rows, sizes[:0])
    return Rounded(values, scales), grouped
