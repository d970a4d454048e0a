"""Gluon, sm90: how a warpgroup attends 64 pairs to keys that another warp brings to shared memory.

A block's scores are multiplied while the previous block's weights are still being multiplied by its
values; its softmax runs beside the latter. Blocks come from the row's end to its start, so that
masks are with the first ones. Knows no page table. Imports Triton.

Everywhere: shape is a GluonShape, known when the kernel is compiled. Three tuples go from hand to
hand, of shared memory and its barriers:

- queries: two slots of (64, head_dim), a warpgroup's each, which take its output at the end.
- stores: K and V, each (num_stages, block_keys, head_dim).
- barriers: of K that it has come and that both warpgroups are done with it, then of V the same;
  each (num_stages, 1). What waits for a stage's n-th use waits for phase n % 2.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

GROUP_ROWS = gl.constexpr(64)
"""Of a tile's pairs, those that a warpgroup has."""
HALF_DIMS = gl.constexpr(64)
"""Elements of a head that lie side by side in shared memory: 128 bytes."""


def _score_layout(keys: int) -> gl.NVMMADistributedLayout:
    """A warpgroup's product of 64 rows and `keys` columns."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, keys, 16]
    )


def _row_layout(dim: int) -> gl.BlockedLayout:
    """(64, dim) as it is read and written: 16 bytes a thread, side by side."""
    lanes = min(32, dim // 8)
    return gl.BlockedLayout([1, 8], [32 // lanes, lanes], [4, 1], [1, 0])


score_layout = gluon.constexpr_function(_score_layout)
row_layout = gluon.constexpr_function(_row_layout)


def _load_queries(
    q: gl.tensor,
    token_stride: gl.tensor,
    first_token: gl.tensor,
    span: gl.tensor,
    head: gl.tensor,
    slot: gl.shared_memory_descriptor,
    shape: gl.constexpr,
) -> None:
    """A warpgroup's pairs to its slot: zeros for what is no pair. span: first pair, pairs."""
    layout: gl.constexpr = row_layout(shape.head_dim)
    pairs = span[0] + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, shape.head_dim, gl.SliceLayout(0, layout))
    tokens = (first_token + pairs // shape.group).to(gl.int64)
    heads = head * shape.group + pairs % shape.group
    at = q + (tokens * token_stride + heads * shape.head_dim)[:, None] + dims[None, :]
    is_cell = (pairs < span[1])[:, None] & (dims >= 0)[None, :]
    slot.store(gl.load(at, mask=is_cell, other=0.0))
    fence_async_shared()
    gl.thread_barrier()


load_queries = gluon.jit(_load_queries)


def _store_rows(
    out: gl.tensor,
    values: gl.tensor,
    first_token: gl.tensor,
    span: gl.tensor,
    head: gl.tensor,
    slot: gl.shared_memory_descriptor,
    shape: gl.constexpr,
) -> None:
    """The pairs' results, in the slot's dtype, by way of the slot that nothing reads any more."""
    layout: gl.constexpr = row_layout(shape.head_dim)
    gl.thread_barrier()
    slot.store(values)
    gl.thread_barrier()
    result = slot.load(layout)
    pairs = span[0] + gl.arange(0, GROUP_ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, shape.head_dim, gl.SliceLayout(0, layout))
    tokens = (first_token + pairs // shape.group).to(gl.int64)
    heads = head * shape.group + pairs % shape.group
    cells = (tokens * (shape.kv_heads * shape.group) + heads) * shape.head_dim
    is_cell = (pairs < span[1])[:, None] & (dims >= 0)[None, :]
    gl.store(out + cells[:, None] + dims[None, :], result, mask=is_cell)


store_rows = gluon.jit(_store_rows)


def _clear_tail(
    v: gl.shared_memory_descriptor, stage: gl.tensor, num_keys: gl.tensor, shape: gl.constexpr
) -> None:
    """Zero a stage's values from key num_keys on: what is stale there may be NaN, which a weight of
    zero does not undo. Both warpgroups do, each for itself; they write the same."""
    halves: gl.constexpr = shape.head_dim // HALF_DIMS
    layout: gl.constexpr = row_layout(HALF_DIMS)
    view = v._reinterpret(
        v.dtype, [shape.num_stages * halves, shape.block_keys, HALF_DIMS], v.layout
    )
    keys = gl.arange(0, shape.block_keys, gl.SliceLayout(1, layout))
    dims = gl.arange(0, HALF_DIMS, gl.SliceLayout(0, layout))
    is_key = (keys < num_keys)[:, None] & (dims >= 0)[None, :]
    for half in gl.static_range(halves):
        part = view.index(stage * halves + half)
        own = part.load(layout)
        part.store(gl.where(is_key, own, gl.zeros_like(own)))
    fence_async_shared()
    gl.thread_barrier()


clear_tail = gluon.jit(_clear_tail)


def _start_scores(
    slot: gl.shared_memory_descriptor,
    stores: gl.tensor,
    barriers: gl.tensor,
    turn: gl.tensor,
    shape: gl.constexpr,
) -> gl.tensor:
    """Begin a turn's product of queries and keys."""
    stage = turn % shape.num_stages
    mbarrier.wait(barriers[0].index(stage), (turn // shape.num_stages) & 1)
    layout: gl.constexpr = score_layout(shape.block_keys)
    zeros = gl.full((GROUP_ROWS, shape.block_keys), 0.0, gl.float32, layout)
    keys = stores[0].index(stage).permute((1, 0))
    return warpgroup_mma(slot, keys, zeros, use_acc=False, is_async=True)


start_scores = gluon.jit(_start_scores)


def _start_values(
    weights: gl.tensor,
    values: gl.tensor,
    stores: gl.tensor,
    barriers: gl.tensor,
    turn: gl.tensor,
    shape: gl.constexpr,
) -> gl.tensor:
    """Begin a turn's product of weights and values, on top of what came before."""
    stage = turn % shape.num_stages
    mbarrier.wait(barriers[2].index(stage), (turn // shape.num_stages) & 1)
    return warpgroup_mma(weights, stores[1].index(stage), values, is_async=True)


start_values = gluon.jit(_start_values)


def _let_go(barrier: gl.shared_memory_descriptor, turn: gl.tensor, shape: gl.constexpr) -> None:
    """This warpgroup is done with the turn's stage: all four warps' products have ended."""
    gl.thread_barrier()
    mbarrier.arrive(barrier.index(turn % shape.num_stages), count=1)


let_go = gluon.jit(_let_go)


def _weigh(
    scores: gl.tensor,
    maxima: gl.tensor,
    places: gl.tensor,
    first_key: gl.tensor,
    to_log2: gl.tensor,
    is_masked: gl.constexpr,
    shape: gl.constexpr,
) -> gl.tensor:
    """Weights float32, new maxima (of scores as they are) and the factor of what came before.

    places: the last key that each pair sees.
    """
    if is_masked:
        layout: gl.constexpr = scores.type.layout
        keys = first_key + gl.arange(0, shape.block_keys, gl.SliceLayout(0, layout))
        seen = keys[None, :] <= places[:, None]
        scores = gl.where(seen, scores, -float("inf"))
    new_maxima = gl.maximum(maxima, gl.max(scores, 1))
    base = new_maxima
    if is_masked:
        # A pair that has seen no key yet has no maximum.
        base = gl.where(new_maxima == -float("inf"), 0.0, new_maxima)
    base = base * to_log2
    rescale = gl.exp2(maxima * to_log2 - base)
    weights = gl.exp2(scores * to_log2 - base[:, None])
    return weights, new_maxima, rescale


weigh = gluon.jit(_weigh)


def _as_operand(weights: gl.tensor, dtype: gl.constexpr, shape: gl.constexpr) -> gl.tensor:
    layout: gl.constexpr = gl.DotOperandLayout(0, score_layout(shape.head_dim), 2)
    return gl.convert_layout(weights.to(dtype), layout)


as_operand = gluon.jit(_as_operand)


def _take_turns(  # noqa: PLR0913
    state: gl.tensor,
    slot: gl.shared_memory_descriptor,
    stores: gl.tensor,
    barriers: gl.tensor,
    places: gl.tensor,
    last_block: gl.tensor,
    start: gl.tensor,
    stop: gl.tensor,
    to_log2: gl.tensor,
    is_masked: gl.constexpr,
    shape: gl.constexpr,
) -> gl.tensor:
    """state, weights of the turn before, maxima, sums and values, after turns start .. stop - 1."""
    weights, maxima, sums, values = state
    dtype: gl.constexpr = slot.dtype
    row: gl.constexpr = gl.SliceLayout(1, score_layout(shape.head_dim))
    for turn in range(start, stop):
        scores_to_come = start_scores(slot, stores, barriers, turn, shape)
        values_to_come = start_values(weights, values, stores, barriers, turn - 1, shape)
        scores = warpgroup_mma_wait(1, deps=[scores_to_come])
        let_go(barriers[1], turn, shape)
        first_key = (last_block - turn) * shape.block_keys
        fresh, maxima, rescale = weigh(scores, maxima, places, first_key, to_log2, is_masked, shape)
        sums = sums * rescale + gl.sum(fresh, 1)
        values = warpgroup_mma_wait(0, deps=[values_to_come])
        let_go(barriers[3], turn - 1, shape)
        values = values * gl.convert_layout(rescale, row)[:, None]
        weights = as_operand(fresh, dtype, shape)
    return weights, maxima, sums, values


take_turns = gluon.jit(_take_turns)


def _attend_rows(  # noqa: PLR0913
    slot: gl.shared_memory_descriptor,
    stores: gl.tensor,
    barriers: gl.tensor,
    places: gl.tensor,
    num_masked: gl.tensor,
    num_blocks: gl.tensor,
    seq_len: gl.tensor,
    to_log2: gl.tensor,
    shape: gl.constexpr,
) -> gl.tensor:
    """A warpgroup's normalised results, float32 (64, head_dim). places: as weigh. num_masked: the
    turns, at least one, in which some pair does not see all keys."""
    layout: gl.constexpr = score_layout(shape.block_keys)
    result: gl.constexpr = score_layout(shape.head_dim)
    dtype: gl.constexpr = slot.dtype
    last_block = num_blocks - 1
    maxima = gl.full((GROUP_ROWS,), -float("inf"), gl.float32, gl.SliceLayout(1, layout))
    values = gl.full((GROUP_ROWS, shape.head_dim), 0.0, gl.float32, result)
    scores = warpgroup_mma_wait(0, deps=[start_scores(slot, stores, barriers, 0, shape)])
    let_go(barriers[1], 0, shape)
    first_key = last_block * shape.block_keys
    fresh, maxima, _ = weigh(scores, maxima, places, first_key, to_log2, True, shape)
    sums = gl.sum(fresh, 1)
    weights = as_operand(fresh, dtype, shape)
    if first_key + shape.block_keys > seq_len:
        mbarrier.wait(barriers[2].index(0), 0)
        clear_tail(stores[1], 0, seq_len - first_key, shape)
    state = (weights, maxima, sums, values)
    state = take_turns(
        state, slot, stores, barriers, places, last_block, 1, num_masked, to_log2, True, shape
    )
    state = take_turns(
        state, slot, stores, barriers, places, last_block, num_masked, num_blocks, to_log2, False,
        shape,
    )  # fmt: skip
    weights, maxima, sums, values = state
    to_come = start_values(weights, values, stores, barriers, last_block, shape)
    values = warpgroup_mma_wait(0, deps=[to_come])
    total = gl.convert_layout(sums, gl.SliceLayout(1, result))
    return values / gl.where(total > 0.0, total, 1.0)[:, None]


attend_rows = gluon.jit(_attend_rows)
