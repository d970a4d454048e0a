"""Triton: what every decode kernel does with a chunk: sweep its keys, then hand in the result.

A chunk's partial result is float32: a maximum (base 2) and a sum relative to it, each for all heads
of the group, then the heads' unnormalised values. Whoever hands in a row's last partial result
joins them all. Knows no plan and no launch. Imports Triton.

Everywhere: shape is a DecodeShape, known when the kernel is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


def _capped(scores: tl.tensor, cap_log2: tl.tensor, shape: tl.constexpr) -> tl.tensor:
    """Scores in base 2, capped where the layer has a cap."""
    if shape.has_cap:
        scores = cap_log2 * (2.0 * tl.sigmoid(2.0 * scores / cap_log2) - 1.0)
    return scores


capped = triton.jit(_capped)


def _add_block(  # noqa: PLR0913
    queries: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    block: tl.tensor,
    first_key: tl.tensor,
    stop: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,
    to_log2: tl.tensor,
    cap_log2: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """The keys from position block on, on top of what came before; those at stop or later and
    those before first_key, which matters with a window only, count nothing.

    sums stay (tile_rows, block_keys) until the end, so that no block waits for their reduction.
    """
    positions = block + tl.arange(0, shape.block_keys)
    is_key = positions < stop
    if shape.has_window:
        is_key &= positions >= first_key
    scores = capped(tl.dot(queries, tl.trans(k)) * to_log2, cap_log2, shape)
    scores = tl.where(is_key[None, :], scores, -float("inf"))
    new_maxima = tl.maximum(maxima, tl.max(scores, 1))
    rescale = tl.exp2(maxima - new_maxima)
    weights = tl.exp2(scores - new_maxima[:, None])
    sums = sums * rescale[:, None] + weights
    values = tl.dot(weights.to(v.dtype), v, values * rescale[:, None])
    return new_maxima, sums, values


add_block = triton.jit(_add_block)


def _sweep_keys(  # noqa: PLR0913
    queries: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    row_pages: tl.tensor,
    kv_head: tl.tensor,
    first_key: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    to_log2: tl.tensor,
    cap_log2: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Add keys start .. stop - 1 that are not before first_key to maxima, sums and values.

    A block that reaches past the end holds the last key again instead: its weights are zero, and
    what is stale in a page's tail, which may be NaN, is never loaded. No load has a mask.
    """
    dims = tl.arange(0, shape.tile_dim)
    keys = tl.arange(0, shape.block_keys)
    token_stride: tl.constexpr = shape.kv_heads * shape.head_dim
    last = tl.maximum(stop - 1, 0)
    # A block's pages are read one block ahead: addresses that a load in the same turn gave would
    # keep the compiler from having several blocks on their way at once.
    if shape.has_whole_blocks:
        next_pages = tl.load(row_pages + tl.minimum(start, last) // shape.page_size)
    else:
        next_pages = tl.load(row_pages + tl.minimum(start + keys, last) // shape.page_size)
    for block in range(start, stop, shape.block_keys):
        pages = next_pages.to(tl.int64)
        positions = tl.minimum(block + keys, last)
        if shape.has_whole_blocks:
            ahead = tl.minimum(block + shape.block_keys, last)
            next_pages = tl.load(row_pages + ahead // shape.page_size)
            base = pages * (shape.page_size * token_stride) + kv_head * shape.head_dim
            offsets = (positions % shape.page_size * token_stride)[:, None] + dims[None, :]
        else:
            following = tl.minimum(positions + shape.block_keys, last)
            next_pages = tl.load(row_pages + following // shape.page_size)
            tokens = pages * shape.page_size + positions % shape.page_size
            base = kv_head * shape.head_dim
            offsets = (tokens * token_stride)[:, None] + dims[None, :]
        if shape.tile_dim == shape.head_dim:
            k = tl.load(k_pages + base + offsets)
            v = tl.load(v_pages + base + offsets)
        else:
            is_dim = (dims < shape.head_dim)[None, :]
            k = tl.load(k_pages + base + offsets, mask=is_dim, other=0.0)
            v = tl.load(v_pages + base + offsets, mask=is_dim, other=0.0)
        maxima, sums, values = add_block(
            queries, k, v, block, first_key, stop, maxima, sums, values, to_log2, cap_log2, shape
        )
    return maxima, sums, values


def _store_partial(
    partial: tl.tensor, maxima: tl.tensor, sums: tl.tensor, values: tl.tensor, shape: tl.constexpr
) -> None:
    heads = tl.arange(0, shape.tile_rows)
    dims = tl.arange(0, shape.tile_dim)
    is_head = heads < shape.group
    tl.store(partial + heads, maxima, mask=is_head)
    tl.store(partial + shape.group + heads, sums, mask=is_head)
    cells = heads[:, None] * shape.head_dim + dims[None, :]
    is_cell = is_head[:, None] & (dims < shape.head_dim)[None, :]
    tl.store(partial + 2 * shape.group + cells, values, mask=is_cell)


def _join_chunks(
    partials: tl.tensor, num_chunks: tl.tensor, chunk_stride: tl.constexpr, shape: tl.constexpr
) -> tl.tensor:
    """The chunks' partial results as one: maxima, sums, unnormalised values of the group.

    Read past the multiprocessor's own cache, as other multiprocessors wrote them a moment ago.
    """
    tile_group: tl.constexpr = shape.tile_group
    tile_dim: tl.constexpr = shape.tile_dim
    heads = tl.arange(0, tile_group)
    dims = tl.arange(0, tile_dim)
    is_head = heads < shape.group
    cells = heads[:, None] * shape.head_dim + dims[None, :]
    is_cell = is_head[:, None] & (dims < shape.head_dim)[None, :]
    maxima = tl.full((tile_group,), -float("inf"), tl.float32)
    sums = tl.zeros((tile_group,), tl.float32)
    values = tl.zeros((tile_group, tile_dim), tl.float32)
    for block in range(0, num_chunks, shape.block_chunks):
        chunks = block + tl.arange(0, shape.block_chunks)
        is_chunk = chunks < num_chunks
        at = partials + chunks.to(tl.int64) * chunk_stride
        is_stat = is_chunk[:, None] & is_head[None, :]
        stats = at[:, None] + heads[None, :]
        part_maxima = tl.load(stats, mask=is_stat, other=-float("inf"), cache_modifier=".cg")
        part_sums = tl.load(stats + shape.group, mask=is_stat, other=0.0, cache_modifier=".cg")
        part_values = tl.load(
            at[:, None, None] + 2 * shape.group + cells[None, :, :],
            mask=is_chunk[:, None, None] & is_cell[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_maxima = tl.maximum(maxima, tl.max(part_maxima, 0))
        # Heads that pad the tile have no maximum.
        base = tl.where(is_head, new_maxima, 0.0)
        rescale = tl.exp2(maxima - base)
        weights = tl.exp2(part_maxima - base[None, :])
        sums = sums * rescale + tl.sum(part_sums * weights, 0)
        values = values * rescale[:, None] + tl.sum(part_values * weights[:, :, None], 0)
        maxima = new_maxima
    return maxima, sums, values


def _write_out(
    out: tl.tensor,
    sinks: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,
    tile_rows: tl.constexpr,
    shape: tl.constexpr,
) -> None:
    """Normalise the group's values and store them; zeros where there was no key."""
    heads = tl.arange(0, tile_rows)
    dims = tl.arange(0, shape.tile_dim)
    is_head = heads < shape.group
    if shape.has_sinks:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        new_maxima = tl.maximum(maxima, sink)
        rescale = tl.exp2(maxima - new_maxima)
        sums = sums * rescale + tl.exp2(sink - new_maxima)
        values = values * rescale[:, None]
    result = (values / tl.where(sums > 0.0, sums, 1.0)[:, None]).to(out.dtype.element_ty)
    cells = heads[:, None] * shape.head_dim + dims[None, :]
    tl.store(out + cells, result, mask=is_head[:, None] & (dims < shape.head_dim)[None, :])


sweep_keys = triton.jit(_sweep_keys)
store_partial = triton.jit(_store_partial)
join_chunks = triton.jit(_join_chunks)
write_out = triton.jit(_write_out)


def _hand_in(  # noqa: PLR0913
    maxima: tl.tensor,
    lane_sums: tl.tensor,
    values: tl.tensor,
    item: tl.tensor,
    first_item: tl.tensor,
    num_chunks: tl.tensor,
    row: tl.tensor,
    head: tl.tensor,
    partials: tl.tensor,
    counters: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """A chunk's result to the group's place in out, at once or by way of the partial results.

    counters: how many of a row's chunks are in, for each row (int64) and KV head; back at 0
    afterwards. Adding to one releases this program's partial result and acquires those of the
    programs that came before.
    """
    sums = tl.sum(lane_sums, 1)
    row_head = row * shape.kv_heads + head
    out += row_head * (shape.group * shape.head_dim)
    sinks += head * shape.group
    if num_chunks == 1:
        write_out(out, sinks, maxima, sums, values, shape.tile_rows, shape)
    else:
        stride: tl.constexpr = shape.kv_heads * shape.partial_size
        first = partials + (first_item * shape.kv_heads + head).to(tl.int64) * shape.partial_size
        own = first + (item - first_item).to(tl.int64) * stride
        store_partial(own, maxima, sums, values, shape)
        # All threads' stores come before the one thread's addition.
        tl.debug_barrier()
        counter = counters + row_head
        num_before = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
        if num_before == num_chunks - 1:
            joined, total, joint_values = join_chunks(first, num_chunks, stride, shape)
            write_out(out, sinks, joined, total, joint_values, shape.tile_group, shape)
            tl.store(counter, 0)


hand_in = triton.jit(_hand_in)
