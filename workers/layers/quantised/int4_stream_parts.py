"""Gluon, sm90: how four-bit weights come to shared memory, and from there to a warp's lanes.

A step is a turn of columns for each warp of a program, of a block's rows. A lane copies the words
that it multiplies itself: 16 bytes of each 128 columns, of two rows of each tile. These are a
tile's n-th and the one that is `further` on: a gate's and its up projection's, or two of a product.
Multiplies nothing. Imports Triton.

Everywhere: shape is a StreamShape, known when the kernel is compiled. room is shared memory: words,
of each tile's two rows and their chunks, (stages, threads, 4) each; of each tile zeros (stages, 2
rows * warps, 8) and scales (stages, 2 rows * 2 halves * warps, 8); x (steps * 4 quarters * chunks,
warps, 16). Chunks are 128 columns of a turn. What is copied one after the other lies in allocations
of its own, or the compiler would have all warps meet between. feature is a block's first output
feature, slot which stage a step has.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

LANES = gl.constexpr(32)
GROUPS = gl.constexpr(8)
"""Of four lanes, which have the same rows of a tile."""


def _fragment_layout(warps: int) -> gl.BlockedLayout:
    """(threads, 4): four registers of each."""
    return gl.BlockedLayout([1, 4], [32, 1], [warps, 1], [1, 0])


def _lane_layout(warps: int) -> gl.BlockedLayout:
    """(warps, 8, 4): one number of each lane."""
    return gl.BlockedLayout([1, 1, 1], [1, 8, 4], [warps, 1, 1], [2, 1, 0])


def _input_layout(warps: int) -> gl.BlockedLayout:
    """(warps, 8, 16): four registers of each lane."""
    return gl.BlockedLayout([1, 1, 4], [1, 8, 4], [warps, 1, 1], [2, 1, 0])


def _brought_layout(items: int, warps: int) -> gl.BlockedLayout:
    """(rows, 8): 16 bytes a thread, which are items."""
    lanes = 8 // items
    return gl.BlockedLayout([1, items], [32 // lanes, lanes], [warps, 1], [1, 0])


def _plain_layout() -> gl.SwizzledSharedLayout:
    return gl.SwizzledSharedLayout(1, 1, 1, [1, 0])


fragment_layout = gluon.constexpr_function(_fragment_layout)
lane_layout = gluon.constexpr_function(_lane_layout)
input_layout = gluon.constexpr_function(_input_layout)
brought_layout = gluon.constexpr_function(_brought_layout)
plain_layout = gluon.constexpr_function(_plain_layout)


def _make_room(scales: gl.tensor, shape: gl.constexpr) -> gl.tensor:
    """words, zeros, scales and x."""
    flat: gl.constexpr = plain_layout()
    chunks: gl.constexpr = shape.turn // 128
    warps: gl.constexpr = shape.warps
    stages: gl.constexpr = shape.stages
    tiles: gl.constexpr = shape.tiles
    dtype: gl.constexpr = scales.dtype.element_ty
    words, zeros, factors = gl.tuple(()), gl.tuple(()), gl.tuple(())
    for _ in gl.static_range(tiles):
        for _ in gl.static_range(2 * chunks):
            words = words + (gl.allocate_shared_memory(gl.int32, [stages, LANES * warps, 4], flat),)
        zeros = zeros + (gl.allocate_shared_memory(gl.int32, [stages, 2 * warps, GROUPS], flat),)
        factors = factors + (gl.allocate_shared_memory(dtype, [stages, 4 * warps, GROUPS], flat),)
    x = gl.allocate_shared_memory(gl.int32, [shape.steps * 4 * chunks, warps, 16], flat)
    return words, zeros, factors, x


make_room = gluon.jit(_make_room)


def _bring_words(
    words: gl.tensor,
    room: gl.tensor,
    feature: gl.tensor,
    step: gl.tensor,
    slot: gl.tensor,
    shape: gl.constexpr,
) -> None:
    layout: gl.constexpr = fragment_layout(shape.warps)
    chunks: gl.constexpr = shape.turn // 128
    row_words: gl.constexpr = shape.columns // 8
    turn_words: gl.constexpr = shape.turn // 8
    thread = gl.arange(0, LANES * shape.warps, gl.SliceLayout(1, layout))
    lane = thread % LANES
    own = lane // 4 * row_words + thread // LANES * turn_words + lane % 4 * 4
    four = gl.arange(0, 4, gl.SliceLayout(0, layout))
    first = words + (feature.to(gl.int64) * row_words + step * (shape.warps * turn_words))
    at = first + (own[:, None] + four[None, :])
    tiles: gl.constexpr = shape.tiles
    for tile in gl.static_range(tiles):
        for which in gl.static_range(2):
            row = tile * shape.tile_step + which * shape.further
            for chunk in gl.static_range(chunks):
                place = room[(2 * tile + which) * chunks + chunk].index(slot)
                further = at + (row * row_words + chunk * 16)
                async_copy.async_copy_global_to_shared(place, further)


bring_words = gluon.jit(_bring_words)


def _bring_eights(
    values: gl.tensor,
    room: gl.tensor,
    first: gl.tensor,
    slot: gl.tensor,
    layout: gl.constexpr,
    shape: gl.constexpr,
) -> None:
    """Of each tile, eight rows' values for each of first, which says where the first tile's lie."""
    at = values + first[:, None] + gl.arange(0, GROUPS, gl.SliceLayout(0, layout))[None, :]
    tiles: gl.constexpr = shape.tiles
    for tile in gl.static_range(tiles):
        place = room[tile].index(slot)
        async_copy.async_copy_global_to_shared(place, at + tile * shape.tile_step)


bring_eights = gluon.jit(_bring_eights)


def _bring_zeros(
    zeros: gl.tensor,
    room: gl.tensor,
    feature: gl.tensor,
    step: gl.tensor,
    slot: gl.tensor,
    shape: gl.constexpr,
) -> None:
    warps: gl.constexpr = shape.warps
    layout: gl.constexpr = brought_layout(4, warps)
    row = gl.arange(0, 2 * warps, gl.SliceLayout(1, layout))
    turn = step * warps + row % warps
    first = turn * shape.rows + row // warps * shape.further
    bring_eights(zeros + feature, room, first, slot, layout, shape)


bring_zeros = gluon.jit(_bring_zeros)


def _bring_scales(
    scales: gl.tensor,
    room: gl.tensor,
    feature: gl.tensor,
    step: gl.tensor,
    slot: gl.tensor,
    shape: gl.constexpr,
) -> None:
    warps: gl.constexpr = shape.warps
    layout: gl.constexpr = brought_layout(128 // scales.dtype.element_ty.primitive_bitwidth, warps)
    row = gl.arange(0, 4 * warps, gl.SliceLayout(1, layout))
    half = 2 * (step * warps + row % warps) + row // warps % 2
    first = half // shape.halves * shape.rows + row // (2 * warps) * shape.further
    bring_eights(scales + feature, room, first, slot, layout, shape)


bring_scales = gluon.jit(_bring_scales)


def _first_feature(block: gl.tensor, shape: gl.constexpr) -> gl.tensor:
    """A block's: the last block may have some of the one before once more. All are multiples of
    8, which Triton sees from this product."""
    eights: gl.constexpr = shape.tiles * shape.tile_step // GROUPS
    return gl.minimum(block * eights, shape.limit // GROUPS - eights) * GROUPS


first_feature = gluon.jit(_first_feature)


def _bring(
    weight: gl.tensor,
    room: gl.tensor,
    first: gl.tensor,
    number: gl.tensor,
    shape: gl.constexpr,
) -> None:
    """The program's step of that number. weight: words, zeros, scales. first: the program's first
    block."""
    feature = first_feature(first + number // shape.steps, shape)
    step, slot = number % shape.steps, number % shape.stages
    bring_words(weight[0], room[0], feature, step, slot, shape)
    bring_zeros(weight[1], room[1], feature, step, slot, shape)
    bring_scales(weight[2], room[2], feature, step, slot, shape)


bring = gluon.jit(_bring)


def _bring_inputs(x: gl.tensor, room: gl.tensor, shape: gl.constexpr) -> None:
    """All of x, whose pairs of columns are int32. Waits for it."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [shape.warps, 1], [1, 0])
    warps: gl.constexpr = shape.warps
    parts: gl.constexpr = shape.turn // 32
    places = room._reinterpret(gl.int32, [shape.steps, parts * warps, 16], plain_layout())
    row = gl.arange(0, parts * warps, gl.SliceLayout(1, layout))
    first = row % warps * (16 * parts) + row // warps * 16
    at = x + first[:, None] + gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :]
    steps: gl.constexpr = shape.steps
    for step in gl.static_range(steps):
        places.index(step).store(gl.load(at + step * (warps * 16 * parts)))


bring_inputs = gluon.jit(_bring_inputs)


def _lane_numbers(place: gl.shared_memory_descriptor, shape: gl.constexpr) -> gl.tensor:
    """(warps, 8) -> (threads,): its row's number for each lane."""
    lanes: gl.constexpr = lane_layout(shape.warps)
    own = place.load(gl.SliceLayout(2, lanes))
    spread = gl.expand_dims(own, 2).broadcast_to([shape.warps, GROUPS, 4])
    flat = spread.reshape([LANES * shape.warps])
    wanted: gl.constexpr = gl.SliceLayout(1, fragment_layout(shape.warps))
    return gl.convert_layout(flat, wanted, assert_trivial=True)


lane_numbers = gluon.jit(_lane_numbers)


def _lane_inputs(room: gl.tensor, part: gl.tensor, shape: gl.constexpr) -> gl.tensor:
    """int32 (threads, 4), pairs of x for each lane's words. part: step, quarter and chunk."""
    own = room.index(part).load(gl.SliceLayout(1, input_layout(shape.warps)))
    spread = gl.expand_dims(own, 1).broadcast_to([shape.warps, GROUPS, 16])
    flat = spread.reshape([LANES * shape.warps, 4])
    return gl.convert_layout(flat, fragment_layout(shape.warps), assert_trivial=True)


lane_inputs = gluon.jit(_lane_inputs)
