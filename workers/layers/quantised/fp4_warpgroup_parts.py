"""Gluon, sm90: what a warpgroup does with 64 rows of MXFP4 and up to 256 tokens in shared memory.

Weights are the tensor cores' first operand. They become bfloat16 in the registers in which the
tensor cores take them: a word of four pairs is a lane's own in each of its groups' products, and
which of shared memory's rows a lane reads is free. So a lane has, of a product's rows m and m + 8,
what belongs together: a gate's and an up projection's row, or two columns of the output side by
side. Knows no expert. Imports Triton.

Everywhere: shape is a WarpgroupShape, tokens 64, 128 or 256; both are known when it is compiled.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from workers.layers.quantised.fp4_values import pair_assembly

GROUP_ROWS = gl.constexpr(64)
"""Of a tile's weights, those that a warpgroup has."""
BOX_ROWS = gl.constexpr(32)
"""Rows of weights that one copy brings: a warpgroup's gates, or its ups, or half its columns."""
TURN_WORDS = gl.constexpr(16)
HALF_COLUMNS = gl.constexpr(64)
"""Columns of x that lie side by side in shared memory: 128 bytes, half a turn."""
_PAIRS = gl.constexpr("=h,=h,r,r")
_ASSEMBLIES = gl.constexpr(tuple(pair_assembly(pair) for pair in range(4)))


def _sum_layout(tokens: int) -> gl.NVMMADistributedLayout:
    """A warpgroup's sums, (64, tokens)."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, tokens, 16]
    )


def _word_layout(is_gated: bool) -> gl.DistributedLinearLayout:
    """(64, 16) words of a turn as lanes need them: lane 4 * i + j has words j, j + 4, j + 8 and
    j + 12 of two rows, which become the product's rows i and i + 8 of a warp's 16."""
    lanes = [[0, 1], [0, 2]]
    if is_gated:
        registers, warps = [[32, 0], [0, 4], [0, 8]], [[8, 0], [16, 0]]
        lanes += [[1, 0], [2, 0], [4, 0]]
    else:
        registers, warps = [[1, 0], [0, 4], [0, 8]], [[16, 0], [32, 0]]
        lanes += [[2, 0], [4, 0], [8, 0]]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [64, 16])


def _store_layout(tokens: int, is_gated: bool) -> gl.DistributedLinearLayout:
    """(columns, tokens) of the output as lanes have them, a lane's two columns side by side."""
    rows = [[0, 1 << bit] for bit in range(3, tokens.bit_length() - 1)]
    lanes = [[0, 2], [0, 4]]
    if is_gated:
        registers, warps = [[0, 1], *rows], [[8, 0], [16, 0]]
        return gl.DistributedLinearLayout(
            registers, [*lanes, [1, 0], [2, 0], [4, 0]], warps, [], [32, tokens]
        )
    registers, warps = [[1, 0], [0, 1], *rows], [[16, 0], [32, 0]]
    return gl.DistributedLinearLayout(
        registers, [*lanes, [2, 0], [4, 0], [8, 0]], warps, [], [64, tokens]
    )


sum_layout = gluon.constexpr_function(_sum_layout)
word_layout = gluon.constexpr_function(_word_layout)
store_layout = gluon.constexpr_function(_store_layout)


def _pairs_of(words: gl.tensor, scales: gl.tensor, group: gl.constexpr) -> gl.tensor:
    """A group's even and its odd columns, (64, 16) bfloat16 each, times their scales.

    words: int32 (64, 16); scales: int32 (64,), as Fp4Stack keeps a turn's."""
    bits = ((scales >> (8 * group)) & 255) << 7
    return gl.inline_asm_elementwise(
        _ASSEMBLIES[group],
        _PAIRS,
        [words, (bits | (bits << 16))[:, None]],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


pairs_of = gluon.jit(_pairs_of)


def _group_of(words: gl.tensor, scales: gl.tensor, group: gl.constexpr) -> gl.tensor:
    """A group's 32 columns, (64, 32)."""
    even, odd = pairs_of(words, scales, group)
    return gl.join(even, odd).reshape([GROUP_ROWS, 2 * TURN_WORDS])


group_of = gluon.jit(_group_of)


def _as_operand(
    words: gl.tensor,
    scales: gl.tensor,
    half: gl.constexpr,
    tokens: gl.constexpr,
    shape: gl.constexpr,
) -> gl.tensor:
    """Half a turn of weights, (64, 64), in the order of the product's rows."""
    first = group_of(words, scales, 2 * half)
    last = group_of(words, scales, 2 * half + 1)
    values = gl.join(first, last).permute([0, 2, 1]).reshape([GROUP_ROWS, HALF_COLUMNS])
    if shape.is_gated:
        values = values.reshape([2, 4, 8, HALF_COLUMNS]).permute([1, 0, 2, 3])
    else:
        values = values.reshape([4, 8, 2, HALF_COLUMNS]).permute([0, 2, 1, 3])
    values = values.reshape([GROUP_ROWS, HALF_COLUMNS])
    layout: gl.constexpr = gl.DotOperandLayout(0, sum_layout(tokens), 2)
    return gl.convert_layout(values, layout, assert_trivial=True)


as_operand = gluon.jit(_as_operand)


def _let_go(barriers: gl.tensor, count: gl.tensor, part: gl.constexpr, shape: gl.constexpr) -> None:
    """This warpgroup is done with a turn: all four warps' products have ended."""
    gl.thread_barrier()
    mbarrier.arrive(barriers[1].index(count % shape.num_stages), count=1)
    if part == 0:
        mbarrier.arrive(barriers[2], count=1, pred=count == 0)


let_go = gluon.jit(_let_go)


def _words_of(
    word_store: gl.shared_memory_descriptor,
    come: gl.shared_memory_descriptor,
    count: gl.tensor,
    part: gl.constexpr,
    shape: gl.constexpr,
) -> gl.tensor:
    """A warpgroup's words (64, 16) of a turn, once they have come. count: turns before it."""
    layout: gl.constexpr = word_layout(shape.is_gated)
    rows = word_store._reinterpret(
        word_store.dtype, [2 * shape.num_stages, GROUP_ROWS, TURN_WORDS], word_store.layout
    )
    stage = count % shape.num_stages
    mbarrier.wait(come.index(stage), (count // shape.num_stages) & 1)
    return rows.index(2 * stage + part).load(layout)


words_of = gluon.jit(_words_of)


def _columns_of(
    x_store: gl.shared_memory_descriptor,
    count: gl.tensor,
    half: gl.constexpr,
    tokens: gl.constexpr,
    shape: gl.constexpr,
) -> gl.tensor:
    """Half a turn of x, (64, tokens) in shared memory."""
    boxes: gl.constexpr = shape.most_tokens // tokens
    view = x_store._reinterpret(
        x_store.dtype, [2 * shape.num_stages * boxes, tokens, HALF_COLUMNS], x_store.layout
    )
    stage = count % shape.num_stages
    return view.index((2 * stage + half) * boxes).permute((1, 0))


columns_of = gluon.jit(_columns_of)


def _sum_turns(
    stores: gl.tensor,
    barriers: gl.tensor,
    scales: gl.tensor,
    scales_at: gl.tensor,
    count: gl.tensor,
    part: gl.constexpr,
    tokens: gl.constexpr,
    shape: gl.constexpr,
) -> gl.tensor:
    """float32 (64, tokens): a tile's sums over all columns. stores, barriers: as the kernel makes
    them. scales: int32 (64,), the rows' of the first turn, which lie at scales_at. count: turns
    before this tile's.

    The second warpgroup begins a turn behind the first one, so that one stores while the other
    multiplies. A turn's first half is made while the last one of the turn before is multiplied.
    Products in the making do not go on from turn to turn: ptxas would wait for each of them.
    """
    x_store, word_store = stores
    come = barriers[0]
    if part == 1:
        mbarrier.wait(barriers[2], 0)
    total = gl.full((GROUP_ROWS, tokens), 0.0, gl.float32, sum_layout(tokens))
    words = words_of(word_store, come, count, part, shape)
    first = as_operand(words, scales, 0, tokens, shape)
    for turn in range(count, count + shape.num_turns - 1):
        x_first = columns_of(x_store, turn, 0, tokens, shape)
        total = warpgroup_mma(first, x_first, total, is_async=True)
        scales_at += shape.num_rows
        next_scales = gl.load(scales_at)
        next_words = words_of(word_store, come, turn + 1, part, shape)
        last = as_operand(words, scales, 1, tokens, shape)
        x_last = columns_of(x_store, turn, 1, tokens, shape)
        total = warpgroup_mma(last, x_last, total, is_async=True)
        words, scales = next_words, next_scales
        to_come = as_operand(words, scales, 0, tokens, shape)
        # Has come already, but what is made before it is not made behind the products' end.
        mbarrier.wait(
            come.index((turn + 1) % shape.num_stages), ((turn + 1) // shape.num_stages) & 1
        )
        total, first = warpgroup_mma_wait(0, deps=[total, to_come])
        let_go(barriers, turn, part, shape)
    turn = count + shape.num_turns - 1
    x_first = columns_of(x_store, turn, 0, tokens, shape)
    total = warpgroup_mma(first, x_first, total, is_async=True)
    if shape.has_last_half:
        last = as_operand(words, scales, 1, tokens, shape)
        x_last = columns_of(x_store, turn, 1, tokens, shape)
        total = warpgroup_mma(last, x_last, total, is_async=True)
    total = warpgroup_mma_wait(0, deps=[total])
    let_go(barriers, turn, part, shape)
    return total


sum_turns = gluon.jit(_sum_turns)
