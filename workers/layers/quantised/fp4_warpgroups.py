"""Gluon, sm90: products of many tokens and MXFP4 experts, by warpgroups.

A program stays on its multiprocessor and takes tile after tile of an expert's product: 128 rows of
weights and a block of up to 256 tokens. One warp brings both to shared memory by TMA, words of
weights as they are kept; two warpgroups have 64 rows each (fp4_warpgroup_parts.py) and store what
comes of them (fp4_warpgroup_stores.py). Knows no routing. Imports Triton.

Everywhere: shape is a WarpgroupShape, known when the kernel is compiled.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from workers.layers.quantised.fp4_warpgroup_parts import (
    BOX_ROWS,
    GROUP_ROWS,
    HALF_COLUMNS,
    TURN_WORDS,
    sum_turns,
    word_layout,
)
from workers.layers.quantised.fp4_warpgroup_stores import store_gated, store_weighed

BOX_TOKENS = gl.constexpr(128)
FEW_TOKENS = gl.constexpr(64)
"""Of which no fewer are multiplied, of those that are brought."""
_CONSUMER_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)


def _place(tile: gl.tensor, num_blocks: gl.tensor, shape: gl.constexpr) -> gl.tensor:
    """(block, tile of columns): as many blocks as a group has take a tile of weights one after the
    other, and all their tiles come before the next blocks'."""
    size = shape.num_tiles * shape.group
    first = tile // size * shape.group
    num_here = gl.minimum(num_blocks - first, shape.group)
    within = tile % size
    return first + within % num_here, within // num_here


place = gluon.jit(_place)


def _find_tile(blocks: gl.tensor, tile: gl.tensor, shape: gl.constexpr) -> gl.tensor:
    """A tile's expert, its block's first place and number of tokens, and which of the output's
    tiles it is. blocks: ExpertBlocks' tensor, its max_blocks and num_blocks."""
    block, column_tile = place(tile, blocks[2], shape)
    at = blocks[0] + block
    expert, first = gl.load(at), gl.load(at + blocks[1])
    return expert, first, gl.load(at + 2 * blocks[1]), column_tile


find_tile = gluon.jit(_find_tile)


def _box_row(
    expert: gl.tensor,
    column_tile: gl.tensor,
    part: gl.constexpr,
    box: gl.constexpr,
    shape: gl.constexpr,
) -> gl.tensor:
    """Where, of all experts' rows, a warpgroup's box begins."""
    if shape.is_gated:
        column = column_tile * GROUP_ROWS + part * BOX_ROWS
        return expert * (2 * shape.width) + box * shape.width + column
    else:  # noqa: RET505
        column = column_tile * (2 * GROUP_ROWS) + part * GROUP_ROWS
        return expert * shape.width + column + box * BOX_ROWS


box_row = gluon.jit(_box_row)


def _bring(  # noqa: PLR0913
    x_map: gl.tensor,
    words_map: gl.tensor,
    expert: gl.tensor,
    first: gl.tensor,
    is_wide: gl.tensor,
    column_tile: gl.tensor,
    turn: gl.tensor,
    count: gl.tensor,
    stores: gl.tensor,
    barriers: gl.tensor,
    shape: gl.constexpr,
) -> None:
    """A turn of both to its stage, as soon as that is free. is_wide: of more than 128 tokens."""
    boxes: gl.constexpr = shape.most_tokens // BOX_TOKENS
    x_store, word_store = stores
    view = x_store._reinterpret(
        x_store.dtype, [2 * shape.num_stages * boxes, BOX_TOKENS, HALF_COLUMNS], x_store.layout
    )
    stage = count % shape.num_stages
    mbarrier.wait(barriers[1].index(stage), ((count // shape.num_stages) & 1) ^ 1)
    come = barriers[0].index(stage)
    word_bytes: gl.constexpr = 2 * GROUP_ROWS * TURN_WORDS * 4
    box_bytes: gl.constexpr = BOX_TOKENS * HALF_COLUMNS * 2
    mbarrier.expect(come, word_bytes + 2 * boxes * box_bytes, pred=is_wide)
    mbarrier.expect(come, word_bytes + 2 * box_bytes, pred=is_wide == 0)
    for part in gl.static_range(2):
        for box in gl.static_range(2):
            row = box_row(expert, column_tile, part, box, shape)
            to = word_store.index((2 * stage + part) * 2 + box)
            tma.async_copy_global_to_shared(words_map, [row, turn * TURN_WORDS], come, to)
    for half in gl.static_range(2):
        column = (2 * turn + half) * HALF_COLUMNS
        to = (2 * stage + half) * boxes
        tma.async_copy_global_to_shared(x_map, [first, column], come, view.index(to))
        for box in gl.static_range(1, boxes):
            tma.async_copy_global_to_shared(
                x_map, [first + box * BOX_TOKENS, column], come, view.index(to + box), pred=is_wide
            )


bring = gluon.jit(_bring)


def _produce(
    x_map: gl.tensor,
    words_map: gl.tensor,
    blocks: gl.tensor,
    stores: gl.tensor,
    barriers: gl.tensor,
    shape: gl.constexpr,
) -> None:
    """One warp: the turns of all of the program's tiles. blocks: as find_tile."""
    count = blocks[2] * 0
    for tile in range(gl.program_id(0), blocks[2] * shape.num_tiles, gl.num_programs(0)):
        expert, first, num_tokens, column_tile = find_tile(blocks, tile, shape)
        is_wide = num_tokens > BOX_TOKENS
        for turn in range(shape.num_turns):
            bring(
                x_map, words_map, expert, first, is_wide, column_tile, turn, count + turn, stores,
                barriers, shape,
            )  # fmt: skip
        count += shape.num_turns


produce = gluon.jit(_produce)


def _scales_of(
    scales: gl.tensor,
    expert: gl.tensor,
    column_tile: gl.tensor,
    part: gl.constexpr,
    shape: gl.constexpr,
) -> gl.tensor:
    """Pointers (64,) to the scales of a warpgroup's rows in turn 0."""
    rows = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, word_layout(shape.is_gated)))
    if shape.is_gated:
        column = column_tile * GROUP_ROWS + part * BOX_ROWS + rows % BOX_ROWS
        row = gl.minimum(column, shape.width - 1) + rows // BOX_ROWS * shape.width
    else:
        column = column_tile * (2 * GROUP_ROWS) + part * GROUP_ROWS + rows
        row = gl.minimum(column, shape.width - 1)
    return scales + expert * (shape.num_turns * shape.num_rows) + row


scales_of = gluon.jit(_scales_of)


def _make_tile(  # noqa: PLR0913
    results: gl.tensor,
    scales: gl.tensor,
    span: gl.tensor,
    to_come: gl.tensor,
    stores: gl.tensor,
    barriers: gl.tensor,
    count: gl.tensor,
    tokens: gl.constexpr,
    part: gl.constexpr,
    shape: gl.constexpr,
) -> gl.tensor:
    """A warpgroup's part of a tile; the scales of the next one's first turn, which come while this
    one is stored. results: scales, bias, weights, pairs, out and its tokens. scales: of the first
    turn. span, to_come: this tile and the next one, as find_tile has them."""
    all_scales, bias, weights, pairs, out, out_tokens = results
    expert, first, num_tokens, column_tile = span
    scales_at = scales_of(all_scales, expert, column_tile, part, shape)
    total = sum_turns(stores, barriers, scales, scales_at, count, part, tokens, shape)
    next_scales = gl.load(scales_of(all_scales, to_come[0], to_come[3], part, shape))
    block = (expert, first, num_tokens)
    if shape.is_gated:
        store_gated(total, bias, out, block, column_tile, tokens, part, shape)
    else:
        store_weighed(
            total, bias, weights, pairs, out, block, column_tile, out_tokens, tokens, part, shape
        )
    return next_scales


make_tile = gluon.jit(_make_tile)


def _consume(
    results: gl.tensor,
    blocks: gl.tensor,
    stores: gl.tensor,
    barriers: gl.tensor,
    part: gl.constexpr,
    shape: gl.constexpr,
) -> None:
    """A warpgroup: 64 of each tile's rows of weights. blocks: as find_tile."""
    step = gl.num_programs(0)
    end = blocks[2] * shape.num_tiles
    count = blocks[2] * 0
    if gl.program_id(0) < end:
        expert, first, num_tokens, column_tile = find_tile(blocks, gl.program_id(0), shape)
        scales = gl.load(scales_of(results[0], expert, column_tile, part, shape))
        for tile in range(gl.program_id(0), end, step):
            span = (expert, first, num_tokens, column_tile)
            to_come = find_tile(blocks, gl.minimum(tile + step, end - 1), shape)
            if num_tokens > BOX_TOKENS:
                scales = make_tile(
                    results, scales, span, to_come, stores, barriers, count, shape.most_tokens,
                    part, shape,
                )  # fmt: skip
            elif num_tokens > FEW_TOKENS:
                scales = make_tile(
                    results, scales, span, to_come, stores, barriers, count, BOX_TOKENS, part, shape
                )
            else:
                scales = make_tile(
                    results, scales, span, to_come, stores, barriers, count, FEW_TOKENS, part, shape
                )
            expert, first, num_tokens, column_tile = to_come
            count += shape.num_turns


consume = gluon.jit(_consume)


def _make_room(x_map: gl.tensor, words_map: gl.tensor, shape: gl.constexpr) -> gl.tensor:
    """stores: x (2 * num_stages, tokens, 64) and words (4 * num_stages, 32, 16). barriers: that a
    stage has come, that both warpgroups are done with it, each (num_stages, 1), and that the first
    one has ended a turn. What waits for a stage's n-th use waits for phase n % 2."""
    stages: gl.constexpr = shape.num_stages
    stores = (
        gl.allocate_shared_memory(
            x_map.dtype, [2 * stages, shape.most_tokens, HALF_COLUMNS], x_map.layout
        ),
        gl.allocate_shared_memory(
            words_map.dtype, [4 * stages, BOX_ROWS, TURN_WORDS], words_map.layout
        ),
    )
    kind: gl.constexpr = mbarrier.MBarrierLayout()
    barriers = (
        gl.allocate_shared_memory(gl.int64, [stages, 1], kind),
        gl.allocate_shared_memory(gl.int64, [stages, 1], kind),
        gl.allocate_shared_memory(gl.int64, [1], kind),
    )
    for stage in gl.static_range(stages):
        mbarrier.init(barriers[0].index(stage), count=1)
        mbarrier.init(barriers[1].index(stage), count=2)
    mbarrier.init(barriers[2], count=1)
    fence_async_shared()
    gl.thread_barrier()
    return stores, barriers


make_room = gluon.jit(_make_room)


def _multiply_experts(  # noqa: PLR0913
    x_map: gl.tensor,
    words_map: gl.tensor,
    scales: gl.tensor,
    bias: gl.tensor,
    weights: gl.tensor,
    pairs: gl.tensor,
    blocks: gl.tensor,
    num_blocks: gl.tensor,
    out: gl.tensor,
    max_blocks: gl.tensor,
    out_tokens: gl.tensor,
    shape: gl.constexpr,
) -> None:
    """Arguments as Fp4WarpgroupTiles passes them."""
    stores, barriers = make_room(x_map, words_map, shape)
    described = (blocks, max_blocks, gl.load(num_blocks))
    results = (scales, bias, weights, pairs, out, out_tokens)
    gl.warp_specialize(
        [
            (consume, (results, described, stores, barriers, gl.constexpr(0), shape)),
            (consume, (results, described, stores, barriers, gl.constexpr(1), shape)),
            (produce, (x_map, words_map, described, stores, barriers, shape)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )


_STEP_VALUES = ("max_blocks", "out_tokens")

multiply_experts_kernel = gluon.jit(
    _multiply_experts, do_not_specialize=_STEP_VALUES, do_not_specialize_on_alignment=_STEP_VALUES
)


def describe_rows(matrix: torch.Tensor, num_rows: int, num_columns: int) -> TensorDescriptor:
    """(rows, columns) contiguous, as copies of num_rows x num_columns read it."""
    bytes_a_row = num_columns * matrix.element_size()
    layout = gl.NVMMASharedLayout(
        swizzle_byte_width=bytes_a_row, element_bitwidth=8 * matrix.element_size(), rank=2
    )
    return TensorDescriptor.from_tensor(matrix, [num_rows, num_columns], layout)
