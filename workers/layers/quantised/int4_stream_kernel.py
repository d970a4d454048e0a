"""Gluon, sm90: packed four-bit weights times one row of x, by programs that stay.

A program has blocks of rows one after the other, all columns of each. Copies of its next steps are
on their way all the time: the first before the predecessor ends, those of a block while the one
before is multiplied and stored. It multiplies as int4_mma.py does. Imports Triton.

Everywhere: shape is a StreamShape, known when the kernel is compiled; room as int4_stream_parts.py
has it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from workers.layers.gemm.skinny import activate
from workers.layers.quantised.int4_fragments import row_sums, turn_sums, turn_zeros, whole
from workers.layers.quantised.int4_stream_parts import (
    GROUPS,
    LANES,
    bring,
    bring_inputs,
    first_feature,
    fragment_layout,
    lane_inputs,
    lane_numbers,
    make_room,
)


def _launch_dependents() -> None:
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


def _await_predecessor() -> None:
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


launch_dependents = gluon.jit(_launch_dependents)
await_predecessor = gluon.jit(_await_predecessor)


def _nothing(shape: gl.constexpr, columns: gl.constexpr) -> gl.tensor:
    layout: gl.constexpr = fragment_layout(shape.warps)
    if columns == 1:
        return gl.full([LANES * shape.warps], 0.0, gl.float32, gl.SliceLayout(1, layout))
    else:  # noqa: RET505 - Triton takes one of branches that all return
        return gl.full([LANES * shape.warps, columns], 0.0, gl.float32, layout)


nothing = gluon.jit(_nothing)


def _tile_zeros(
    room: gl.tensor, slot: gl.tensor, dtype: gl.constexpr, shape: gl.constexpr
) -> gl.tensor:
    """As turn_sums has them. room: of the tile."""
    rows = room._reinterpret(gl.int32, [2 * shape.stages, shape.warps, GROUPS], room.layout)
    first = lane_numbers(rows.index(2 * slot), shape)
    second = lane_numbers(rows.index(2 * slot + 1), shape)
    zeros = turn_zeros(first, second, dtype, True)
    return gl.convert_layout(zeros, fragment_layout(shape.warps), assert_trivial=True)


tile_zeros = gluon.jit(_tile_zeros)


def _add_scaled(
    totals: gl.tensor,
    sums: gl.tensor,
    room: gl.tensor,
    slot: gl.tensor,
    shape: gl.constexpr,
) -> gl.tensor:
    """A tile's totals of both rows and what a turn's halves add to them. room: of its scales."""
    rows = room._reinterpret(room.dtype, [4 * shape.stages, shape.warps, GROUPS], room.layout)
    layout: gl.constexpr = gl.SliceLayout(1, fragment_layout(shape.warps))
    low, high = row_sums(sums[0]), row_sums(sums[1])
    out = gl.tuple(())
    for row in gl.static_range(2):
        at = 4 * slot + 2 * row
        one = lane_numbers(rows.index(at), shape).to(gl.float32)
        two = lane_numbers(rows.index(at + 1), shape).to(gl.float32)
        total = totals[row] + gl.convert_layout(low[row], layout, assert_trivial=True) * one
        total += gl.convert_layout(high[row], layout, assert_trivial=True) * two
        out = out + (total,)
    return out


add_scaled = gluon.jit(_add_scaled)


def _multiply_step(
    totals: gl.tensor,
    room: gl.tensor,
    step: gl.tensor,
    slot: gl.tensor,
    dtype: gl.constexpr,
    shape: gl.constexpr,
) -> gl.tensor:
    """totals, float32 (threads,) of each tile's two rows, and a step's products."""
    layout: gl.constexpr = fragment_layout(shape.warps)
    chunks: gl.constexpr = shape.turn // 128
    tiles: gl.constexpr = shape.tiles
    sums, zeros = gl.tuple(()), gl.tuple(())
    for tile in gl.static_range(tiles):
        sums = sums + ((nothing(shape, 4), nothing(shape, 4)),)
        zeros = zeros + (tile_zeros(room[1][tile], slot, dtype, shape),)
    for chunk in gl.static_range(chunks):
        x = gl.tuple(())
        for quarter in gl.static_range(4):
            part = (step * 4 + quarter) * chunks + chunk
            x = x + (lane_inputs(room[3], part, shape),)
        added = gl.tuple(())
        for tile in gl.static_range(tiles):
            first = room[0][2 * tile * chunks + chunk].index(slot).load(layout)
            second = room[0][(2 * tile + 1) * chunks + chunk].index(slot).load(layout)
            words = first, second
            added = added + (turn_sums(words, x, zeros[tile], sums[tile], dtype, True),)
        sums = added
    out = gl.tuple(())
    for tile in gl.static_range(tiles):
        own = totals[2 * tile], totals[2 * tile + 1]
        out = out + add_scaled(own, sums[tile], room[2][tile], slot, shape)
    return out


multiply_step = gluon.jit(_multiply_step)


def _of_all_warps(
    first: gl.tensor, second: gl.tensor, dtype: gl.constexpr, shape: gl.constexpr
) -> gl.tensor:
    """float32 (threads,), of a tile's rows -> (8,) each: a row's four lanes have the same."""
    both = gl.join(first, second).reshape([shape.warps, GROUPS, 4, 2])
    return gl.split(gl.sum(gl.sum(both, axis=2), axis=0) * (whole(dtype) / 4))


of_all_warps = gluon.jit(_of_all_warps)


def _store_block(
    out: gl.tensor,
    totals: gl.tensor,
    feature: gl.tensor,
    dtype: gl.constexpr,
    shape: gl.constexpr,
    IS_GELU: gl.constexpr,  # noqa: N803
) -> None:
    tiles: gl.constexpr = shape.tiles
    for tile in gl.static_range(tiles):
        first, second = of_all_warps(totals[2 * tile], totals[2 * tile + 1], dtype, shape)
        row = gl.arange(0, GROUPS, first.type.layout)
        at = out + (feature + tile * shape.tile_step) + row
        if shape.tile_step == GROUPS:
            gl.store(at, activate(first, second, IS_GELU, dtype))
        else:
            gl.store(at, first.to(dtype))
            gl.store(at + GROUPS, second.to(dtype))


store_block = gluon.jit(_store_block)


def _ask(
    weight: gl.tensor,
    room: gl.tensor,
    first: gl.tensor,
    number: gl.tensor,
    count: gl.tensor,
    shape: gl.constexpr,
    IS_DEPENDENT: gl.constexpr,  # noqa: N803
) -> None:
    """For the program's step of that number, of count; lets the next kernel begin where shape says.
    What is waited for are groups, one a call, with nothing in them beyond the last step."""
    if number < count:
        bring(weight, room, first, number, shape)
    async_copy.commit_group()
    if IS_DEPENDENT and number == gl.maximum(count - 1 - shape.early, 0):
        launch_dependents()


ask = gluon.jit(_ask)


def _int4_stream(
    x: gl.tensor,
    words: gl.tensor,
    zeros: gl.tensor,
    scales: gl.tensor,
    out: gl.tensor,
    shape: gl.constexpr,
    IS_GELU: gl.constexpr,  # noqa: N803
    IS_DEPENDENT: gl.constexpr,  # noqa: N803
) -> None:
    """Programs have blocks, as many each but for one."""
    ahead: gl.constexpr = shape.stages - 1
    tiles: gl.constexpr = shape.tiles
    room = make_room(scales, shape)
    weight = (words, zeros, scales)
    first = gl.program_id(0) * shape.blocks // gl.num_programs(0)
    last = (gl.program_id(0) + 1) * shape.blocks // gl.num_programs(0)
    count = (last - first) * shape.steps
    for number in range(ahead):
        ask(weight, room, first, number, count, shape, IS_DEPENDENT)
    if IS_DEPENDENT:
        await_predecessor()
    dtype: gl.constexpr = x.dtype.element_ty
    bring_inputs(x.to(gl.pointer_type(gl.int32), bitcast=True), room[3], shape)
    number = first * 0
    for block in range(first, last):
        totals = gl.tuple(())
        for _ in gl.static_range(2 * tiles):
            totals = totals + (nothing(shape, 1),)
        for step in range(shape.steps):
            async_copy.wait_group(ahead - 1)
            ask(weight, room, first, number + ahead, count, shape, IS_DEPENDENT)
            totals = multiply_step(totals, room, step, number % shape.stages, dtype, shape)
            number += 1
        store_block(out, totals, first_feature(block, shape), dtype, shape, IS_GELU)


int4_stream_kernel = gluon.jit(_int4_stream)
