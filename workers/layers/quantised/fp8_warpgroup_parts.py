"""Gluon, sm90: how a warpgroup multiplies 64 rows of an expert by two tiles of its FP8 weights.

A turn is 128 columns of the inner dimension, a block of weights. Its products are sums of their own
in the tensor cores, which are multiplied by the scales of both operands in float32 and added up:
one warpgroup does that beside the other's products (as DeepGEMM's kernels do). Knows no gate and no
place of results. Imports Triton.

Everywhere: shape is a WarpgroupShape, known when the kernel is compiled. Two tuples go from hand to
hand, of shared memory and its barriers:

- stores: rows (2 * num_stages, 64, 128), a warpgroup's each, and weights (2 * num_stages, 128,
  128), both tiles'.
- barriers: that a stage has come and that both warpgroups are done with it, each (num_stages, 1).
  What waits for a stage's n-th use waits for phase n % 2.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

GROUP_ROWS = gl.constexpr(64)
"""Of a block of pairs, those that a warpgroup has."""
BLOCK = gl.constexpr(128)
"""Columns of a turn and of a tile of weights: one block of scales."""


class WarpgroupShape(NamedTuple):
    """num_turns: of 128 columns of the inner dimension. num_tiles: pairs of tiles of an expert's
    weights. num_rows: of an expert's matrix. step, apart: rows of weights from pair to pair, and
    from a pair's first to its second. num_chosen: choices of a token. num_stages: turns on their
    way."""

    num_turns: int
    num_tiles: int
    num_rows: int
    step: int
    apart: int
    num_chosen: int
    num_stages: int


def _product_layout() -> gl.NVMMADistributedLayout:
    """A warpgroup's product of 64 rows and 128 columns."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 32]
    )


def _stored_layout(items: int) -> gl.BlockedLayout:
    """(64, 128) as it is written: 16 bytes a thread, which are items, side by side."""
    lanes = 128 // items
    return gl.BlockedLayout([1, items], [32 // lanes, lanes], [4, 1], [1, 0])


product_layout = gluon.constexpr_function(_product_layout)
stored_layout = gluon.constexpr_function(_stored_layout)


def _begin_dependent() -> None:
    """As launch.begin_dependent: by the first warpgroup, before the others begin."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; griddepcontrol.wait; // $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


begin_dependent = gluon.jit(_begin_dependent)


def _make_room(rows_map: gl.tensor, weight_map: gl.tensor, shape: gl.constexpr) -> gl.tensor:
    """stores and barriers. Maps are descriptors, of (128, 128) each."""
    layout: gl.constexpr = rows_map.layout
    num_stages: gl.constexpr = shape.num_stages
    rows = gl.allocate_shared_memory(rows_map.dtype, [2 * num_stages, GROUP_ROWS, BLOCK], layout)
    weights = gl.allocate_shared_memory(weight_map.dtype, [2 * num_stages, BLOCK, BLOCK], layout)
    kind: gl.constexpr = mbarrier.MBarrierLayout()
    come = gl.allocate_shared_memory(gl.int64, [num_stages, 1], kind)
    free = gl.allocate_shared_memory(gl.int64, [num_stages, 1], kind)
    for stage in gl.static_range(num_stages):
        mbarrier.init(come.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    return (rows, weights), (come, free)


make_room = gluon.jit(_make_room)


def _bring(
    rows_map: gl.tensor,
    weight_map: gl.tensor,
    at: gl.tensor,
    stores: gl.tensor,
    barriers: gl.tensor,
    turn: gl.tensor,
    shape: gl.constexpr,
) -> None:
    """A turn's rows and weights to its stage, as soon as that is free. at: the first of the rows,
    that of the weights, and which of the tile's turns it is."""
    first, row, part = at
    num_stages: gl.constexpr = shape.num_stages
    rows, weights = stores
    # The same bytes: a row's 128 lie together.
    both = rows._reinterpret(rows.dtype, [num_stages, 2 * GROUP_ROWS, BLOCK], rows.layout)
    stage = turn % num_stages
    mbarrier.wait(barriers[1].index(stage), ((turn // num_stages) & 1) ^ 1)
    come = barriers[0].index(stage)
    mbarrier.expect(come, 3 * BLOCK * BLOCK)
    column = part * BLOCK
    tma.async_copy_global_to_shared(rows_map, [first, column], come, both.index(stage))
    for which in gl.static_range(2):
        corner = [row + which * shape.apart, column]
        store = weights.index(2 * stage + which)
        tma.async_copy_global_to_shared(weight_map, corner, come, store)


bring = gluon.jit(_bring)


def _let_go(barriers: gl.tensor, turn: gl.tensor, shape: gl.constexpr) -> None:
    """This warpgroup is done with the turn's stage: all four warps' products have ended."""
    gl.thread_barrier()
    mbarrier.arrive(barriers[1].index(turn % shape.num_stages), count=1)


let_go = gluon.jit(_let_go)


def _await_turn(barriers: gl.tensor, turn: gl.tensor, shape: gl.constexpr) -> None:
    phase = (turn // shape.num_stages) & 1
    mbarrier.wait(barriers[0].index(turn % shape.num_stages), phase)


await_turn = gluon.jit(_await_turn)


def _multiply(
    stores: gl.tensor,
    turn: gl.tensor,
    which: gl.constexpr,
    group: gl.constexpr,
    shape: gl.constexpr,
) -> gl.tensor:
    """float32 (64, 128): the turn's rows of a warpgroup times one of its tiles of weights."""
    layout: gl.constexpr = product_layout()
    stage = 2 * (turn % shape.num_stages)
    rows, weights = stores[0].index(stage + group), stores[1].index(stage + which)
    zeros = gl.full((GROUP_ROWS, BLOCK), 0.0, gl.float32, layout)
    to_come = warpgroup_mma(rows, weights.permute((1, 0)), zeros, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=[to_come])


multiply = gluon.jit(_multiply)


def _take_turns(
    row_scales: gl.tensor,
    rows: gl.tensor,
    scales: gl.tensor,
    stores: gl.tensor,
    barriers: gl.tensor,
    turn: gl.tensor,
    group: gl.constexpr,
    shape: gl.constexpr,
) -> gl.tensor:
    """Both products of a tile, float32 (64, 128) each. turn: the tile's first. row_scales: of
    all rows and their number, a turn's side by side; rows: int32 (64,). scales: to that of the
    first tile's first block."""
    layout: gl.constexpr = product_layout()
    one = gl.full((GROUP_ROWS, BLOCK), 0.0, gl.float32, layout)
    two = gl.full((GROUP_ROWS, BLOCK), 0.0, gl.float32, layout)
    second: gl.constexpr = shape.apart // BLOCK * shape.num_turns
    for part in range(shape.num_turns):
        # Asked for before the stage has come, so that they are there when products end.
        row_scale = gl.load(row_scales[0] + part * row_scales[1] + rows)
        one_scale = gl.load(scales + part)
        two_scale = gl.load(scales + second + part)
        await_turn(barriers, turn + part, shape)
        product = multiply(stores, turn + part, 0, group, shape)
        one += product * (row_scale * one_scale)[:, None]
        product = multiply(stores, turn + part, 1, group, shape)
        let_go(barriers, turn + part, shape)
        two += product * (row_scale * two_scale)[:, None]
    return one, two


take_turns = gluon.jit(_take_turns)


def _skip_turns(barriers: gl.tensor, turn: gl.tensor, shape: gl.constexpr) -> None:
    """Of a tile of which this warpgroup has no row."""
    for part in range(shape.num_turns):
        await_turn(barriers, turn + part, shape)
        let_go(barriers, turn + part, shape)


skip_turns = gluon.jit(_skip_turns)
