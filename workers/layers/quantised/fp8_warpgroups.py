"""Gluon, sm90: products with FP8 experts of many rows, by programs that stay.

One warp brings rows and weights to shared memory by tensor maps, two warpgroups with 64 rows of a
block each multiply them. Programs take tile after tile, so that the next one's first turns come
while the last one's results are stored; all tiles of a block come one after the other, so that its
rows and its expert's weights are in L2 while they are asked for. What is computed is what
expert_fp8.py says. Imports Triton.

Everywhere: shape is a WarpgroupShape, known when the kernel is compiled; span is a program's first
tile, the one behind the last and the step; blocks are ExpertBlocks' tensor and its max_blocks.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from workers.layers.quantised.fp8_warpgroup_parts import (
    BLOCK,
    GROUP_ROWS,
    WarpgroupShape,
    begin_dependent,
    bring,
    make_room,
    product_layout,
    skip_turns,
    stored_layout,
    take_turns,
)

_FP8_MAX = gl.constexpr(448.0)
_LEAST = gl.constexpr(1e-12)
"""Of a largest magnitude, as fp8_rounding.py."""
_LOG2_E = gl.constexpr(1.4426950408889634)
_ACTIVATE_REGISTERS = gl.constexpr((224, 56))
_PROJECT_REGISTERS = gl.constexpr((232, 40))
"""Of a thread of the second warpgroup and of the warp that brings turns; the first one has what is
left, as many as the second. With 240 ptxas keeps the registers of a turn's two products apart and
spills sums; with these nothing is spilled."""


def _find_tile(blocks: gl.tensor, tile: gl.tensor, shape: gl.constexpr) -> gl.tensor:
    """A tile's expert, first row, number of rows, and which of the block's tiles it is."""
    at = blocks[0] + tile // shape.num_tiles
    expert, first = gl.load(at), gl.load(at + blocks[1])
    return expert, first, gl.load(at + 2 * blocks[1]), tile % shape.num_tiles


find_tile = gluon.jit(_find_tile)


def _produce(
    rows_map: gl.tensor,
    weight_map: gl.tensor,
    blocks: gl.tensor,
    span: gl.tensor,
    stores: gl.tensor,
    barriers: gl.tensor,
    shape: gl.constexpr,
) -> None:
    """One warp: all turns of all tiles."""
    turn = span[0] * 0
    for tile in range(span[0], span[1], span[2]):
        expert, first, _, column = find_tile(blocks, tile, shape)
        row = expert * shape.num_rows + column * shape.step
        for part in range(shape.num_turns):
            at = (first, row, part)
            bring(rows_map, weight_map, at, stores, barriers, turn + part, shape)
        turn += shape.num_turns


produce = gluon.jit(_produce)


def _products(
    row_scales: gl.tensor,
    scales: gl.tensor,
    at: gl.tensor,
    room: gl.tensor,
    turn: gl.tensor,
    group: gl.constexpr,
    shape: gl.constexpr,
) -> gl.tensor:
    """As take_turns. row_scales: of all rows and their number, rows of a group's side by side.
    at: expert, which of the block's tiles, and this warpgroup's first row; those behind the last
    row of all take its scales."""
    expert, column, first = at
    lanes: gl.constexpr = gl.SliceLayout(1, product_layout())
    rows = gl.minimum(first + gl.arange(0, GROUP_ROWS, lanes), row_scales[1] - 1)
    block = (expert * shape.num_rows + column * shape.step) // BLOCK
    return take_turns(
        row_scales,
        rows,
        scales + block * shape.num_turns,
        room[0],
        room[1],
        turn,
        group,
        shape,
    )


products = gluon.jit(_products)


def _place(
    results: gl.tensor, store: gl.shared_memory_descriptor, items: gl.constexpr
) -> gl.tensor:
    """(64, 128) as it is written to memory, by way of store, whose last reader may be busy yet."""
    layout: gl.constexpr = stored_layout(items)
    gl.thread_barrier()
    store.store(results)
    gl.thread_barrier()
    return store.load(layout)


place = gluon.jit(_place)


def _reciprocal(value: gl.tensor) -> gl.tensor:
    """Within 2**-23 of it, of normal values; one instruction."""
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [value], dtype=gl.float32, is_pure=True, pack=1
    )


reciprocal = gluon.jit(_reciprocal)


def _activated(
    gate: gl.tensor,
    up: gl.tensor,
    ALPHA: gl.constexpr,  # noqa: N803
    LIMIT: gl.constexpr,  # noqa: N803
) -> gl.tensor:
    """As expert_gating.gated, without a rounding to 16 bits: one to FP8 comes next."""
    if LIMIT > 0:
        # Not minimum and maximum: what is no number has to stay none.
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    return gate * reciprocal(1.0 + gl.exp2(gate * (-ALPHA * _LOG2_E))) * up


activated = gluon.jit(_activated)


def _store_gated(
    gate: gl.tensor,
    up: gl.tensor,
    outs: gl.tensor,
    own: gl.tensor,
    column: gl.tensor,
    store: gl.shared_memory_descriptor,
    gating: gl.constexpr,
    shape: gl.constexpr,
) -> None:
    """Gated and rounded. outs: values, scales and the number of rows. own: this warpgroup's first
    row and its rows."""
    width: gl.constexpr = shape.num_tiles * BLOCK
    values = activated(gate, up, gating[0], gating[1])
    scale = gl.maximum(gl.max(gl.abs(values), 1), _LEAST) / _FP8_MAX
    lane = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, product_layout()))
    gl.store(outs[1] + column * outs[2] + own[0] + lane, scale, mask=lane < own[1])
    # The conversion takes what is above the largest for it, and no number for none.
    rounded = (values * reciprocal(scale)[:, None]).to(store.dtype)
    layout: gl.constexpr = stored_layout(16)
    result = place(rounded, store, 16)
    rows = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout))
    columns = column * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    at = outs[0] + ((own[0] + rows).to(gl.int64) * width)[:, None] + columns[None, :]
    gl.store(at, result, mask=(rows < own[1])[:, None] & (columns >= 0)[None, :])


store_gated = gluon.jit(_store_gated)


def _activate_rows(  # noqa: PLR0913
    row_scales: gl.tensor,
    scales: gl.tensor,
    outs: gl.tensor,
    blocks: gl.tensor,
    span: gl.tensor,
    room: gl.tensor,
    group: gl.constexpr,
    gating: gl.constexpr,
    shape: gl.constexpr,
) -> None:
    """A warpgroup: 64 rows of each tile. room: stores, barriers and what results go by."""
    turn = span[0] * 0
    for tile in range(span[0], span[1], span[2]):
        expert, first, count, column = find_tile(blocks, tile, shape)
        own = (first + group * GROUP_ROWS, count - group * GROUP_ROWS)
        if own[1] > 0:
            at = (expert, column, own[0])
            gate, up = products(row_scales, scales, at, room, turn, group, shape)
            store_gated(gate, up, outs, own, column, room[2].index(group), gating, shape)
        else:
            skip_turns(room[1], turn, shape)
        turn += shape.num_turns


activate_rows = gluon.jit(_activate_rows)


def _activate(  # noqa: PLR0913
    rows_map: gl.tensor,
    row_scales: gl.tensor,
    weight_map: gl.tensor,
    scales: gl.tensor,
    blocks: gl.tensor,
    num_blocks: gl.tensor,
    max_blocks: gl.tensor,
    num_rows: gl.tensor,
    out: gl.tensor,
    out_scales: gl.tensor,
    gating: gl.constexpr,
    shape: gl.constexpr,
) -> None:
    """The gated rows @ gate.T and rows @ up.T, rounded. gating: alpha and limit."""
    stores, barriers = make_room(rows_map, weight_map, shape)
    results = gl.allocate_shared_memory(rows_map.dtype, [2, GROUP_ROWS, BLOCK], rows_map.layout)
    room = (stores, barriers, results)
    begin_dependent()
    last = gl.load(num_blocks) * shape.num_tiles
    span = (gl.program_id(0), last, gl.num_programs(0))
    places, outs, rows = (blocks, max_blocks), (out, out_scales, num_rows), (row_scales, num_rows)
    gl.warp_specialize(
        [
            (
                activate_rows,
                (rows, scales, outs, places, span, room, gl.constexpr(0), gating, shape),
            ),
            (
                activate_rows,
                (rows, scales, outs, places, span, room, gl.constexpr(1), gating, shape),
            ),
            (produce, (rows_map, weight_map, places, span, stores, barriers, shape)),
        ],
        [4, 1],
        [_ACTIVATE_REGISTERS[0], _ACTIVATE_REGISTERS[1]],
    )


def _store_projected(
    product: gl.tensor,
    out: gl.tensor,
    num_tokens: gl.tensor,
    at: gl.tensor,
    num_own: gl.tensor,
    column: gl.tensor,
    store: gl.shared_memory_descriptor,
    shape: gl.constexpr,
) -> None:
    """At (choice, token). at: pointers to the pairs, the first of which is this warpgroup's first
    row's. column: the first of 128."""
    layout: gl.constexpr = stored_layout(8)
    result = place(product.to(store.dtype), store, 8)
    rows = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout))
    pair = gl.load(at + rows, mask=rows < num_own, other=0)
    to = (pair % shape.num_chosen).to(gl.int64) * num_tokens + pair // shape.num_chosen
    columns = column + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
    target = out + (to * shape.num_rows)[:, None] + columns[None, :]
    gl.store(target, result, mask=(rows < num_own)[:, None] & (columns >= 0)[None, :])


store_projected = gluon.jit(_store_projected)


def _project_rows(  # noqa: PLR0913
    row_scales: gl.tensor,
    scales: gl.tensor,
    weights: gl.tensor,
    pairs: gl.tensor,
    outs: gl.tensor,
    blocks: gl.tensor,
    span: gl.tensor,
    room: gl.tensor,
    group: gl.constexpr,
    shape: gl.constexpr,
) -> None:
    """A warpgroup: 64 rows of each tile. outs: the output and the number of tokens."""
    turn = span[0] * 0
    lane = gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, product_layout()))
    store = room[2].index(group)
    for tile in range(span[0], span[1], span[2]):
        expert, first, count, column = find_tile(blocks, tile, shape)
        own, num_own = first + group * GROUP_ROWS, count - group * GROUP_ROWS
        if num_own > 0:
            pair = gl.load(pairs + own + lane, mask=lane < num_own, other=0)
            weight = gl.load(weights + pair)
            at = (expert, column, own)
            one, two = products(row_scales, scales, at, room, turn, group, shape)
            from_pair, to = pairs + own, column * (2 * BLOCK)
            one *= weight[:, None]
            store_projected(one, outs[0], outs[1], from_pair, num_own, to, store, shape)
            two *= weight[:, None]
            store_projected(two, outs[0], outs[1], from_pair, num_own, to + BLOCK, store, shape)
        else:
            skip_turns(room[1], turn, shape)
        turn += shape.num_turns


project_rows = gluon.jit(_project_rows)


def _project(  # noqa: PLR0913
    rows_map: gl.tensor,
    row_scales: gl.tensor,
    weight_map: gl.tensor,
    scales: gl.tensor,
    weights: gl.tensor,
    pairs: gl.tensor,
    blocks: gl.tensor,
    num_blocks: gl.tensor,
    max_blocks: gl.tensor,
    num_rows: gl.tensor,
    num_tokens: gl.tensor,
    out: gl.tensor,
    shape: gl.constexpr,
) -> None:
    """weight * (rows @ down.T), at (choice, token)."""
    stores, barriers = make_room(rows_map, weight_map, shape)
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    results = gl.allocate_shared_memory(out.dtype.element_ty, [2, GROUP_ROWS, BLOCK], layout)
    room = (stores, barriers, results)
    begin_dependent()
    last = gl.load(num_blocks) * shape.num_tiles
    span = (gl.program_id(0), last, gl.num_programs(0))
    places, outs, rows = (blocks, max_blocks), (out, num_tokens), (row_scales, num_rows)
    gl.warp_specialize(
        [
            (
                project_rows,
                (rows, scales, weights, pairs, outs, places, span, room, gl.constexpr(0), shape),
            ),
            (
                project_rows,
                (rows, scales, weights, pairs, outs, places, span, room, gl.constexpr(1), shape),
            ),
            (produce, (rows_map, weight_map, places, span, stores, barriers, shape)),
        ],
        [4, 1],
        [_PROJECT_REGISTERS[0], _PROJECT_REGISTERS[1]],
    )


def describe(matrices: torch.Tensor) -> TensorDescriptor:
    """Of float8_e4m3fn (..., columns), contiguous, as one matrix, a block at a time."""
    matrix = matrices.view(-1, matrices.shape[-1])
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    return TensorDescriptor.from_tensor(matrix, [BLOCK.value, BLOCK.value], layout)


__all__ = ["WarpgroupShape", "activate_kernel", "describe", "project_kernel"]

# Numbers that differ from step to step make no kernels of their own.
activate_kernel = gluon.jit(_activate, do_not_specialize=["max_blocks", "num_rows"])
project_kernel = gluon.jit(_project, do_not_specialize=["max_blocks", "num_rows", "num_tokens"])
