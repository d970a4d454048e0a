"""Triton: attention of one query a row over paged K and V, with rows cut into even chunks.

Flash-decoding (Dao et al., 2023) with a plan: made once a step, on the device, it settles the
chunks so that a batch of unlike rows loads the multiprocessors evenly. A row of one chunk is done
in one go; another kernel joins the chunks of the others. Query heads that share a KV head are one
tile. Knows no batch and no pool; paged_decode.py launches it. Imports Triton.

A plan is int32: the number of chunks; of each chunk (max_items) its row, where its keys start and
stop, and how many chunks its row has; of each row its first chunk and its number of chunks. A
chunk's partial result is float32: a maximum (base 2) and a sum relative to it, each for all heads
of the group, then the heads' unnormalised values.

Everywhere: shape is a DecodeShape, known when the kernel is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)
PLAN_HEADER = tl.constexpr(4)
CHUNK_FIELDS = tl.constexpr(4)
ROW_FIELDS = tl.constexpr(2)


def _plan_chunks(  # noqa: PLR0913
    cache_seqlens: tl.tensor,
    plan: tl.tensor,
    num_rows: tl.tensor,
    max_items: tl.tensor,
    window: tl.tensor,
    target_chunks: tl.tensor,
    min_chunk: tl.tensor,
    shape: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    """One program. A row without keys is one empty chunk, which writes zeros."""
    gdc_wait()
    rows = tl.arange(0, block_rows)
    is_row = rows < num_rows
    seq_lens = tl.load(cache_seqlens + rows, mask=is_row, other=0)
    # Chunks start at multiples of a block, so that a block lies in one page.
    first_keys = tl.maximum(seq_lens - window, 0) // shape.block_keys * shape.block_keys
    lengths = seq_lens - first_keys
    ideal = tl.maximum(tl.cdiv(tl.sum(lengths), target_chunks), min_chunk)
    wanted = tl.maximum((lengths + ideal // 2) // ideal, 1)
    sizes = tl.cdiv(tl.maximum(tl.cdiv(lengths, wanted), 1), shape.block_keys) * shape.block_keys
    num_chunks = tl.where(is_row, tl.maximum(tl.cdiv(lengths, sizes), 1), 0)
    first_items = tl.cumsum(num_chunks) - num_chunks
    tl.store(plan, tl.sum(num_chunks))
    for i in range(0, tl.max(num_chunks)):
        is_chunk = i < num_chunks
        chunk = plan + PLAN_HEADER + (first_items + i) * CHUNK_FIELDS
        starts = first_keys + i * sizes
        tl.store(chunk, rows, mask=is_chunk)
        tl.store(chunk + 1, starts, mask=is_chunk)
        tl.store(chunk + 2, tl.minimum(starts + sizes, seq_lens), mask=is_chunk)
        tl.store(chunk + 3, num_chunks, mask=is_chunk)
    of_row = plan + PLAN_HEADER + max_items * CHUNK_FIELDS + rows * ROW_FIELDS
    tl.store(of_row, first_items, mask=is_row)
    tl.store(of_row + 1, num_chunks, mask=is_row)


def _sweep_keys(  # noqa: PLR0913
    queries: tl.tensor,
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
    """Keys start .. stop - 1 that are not before first_key: maxima, sums, unnormalised values."""
    tile_rows: tl.constexpr = shape.tile_rows
    tile_dim: tl.constexpr = shape.tile_dim
    dims = tl.arange(0, tile_dim)
    keys = tl.arange(0, shape.block_keys)
    maxima = tl.full((tile_rows,), -float("inf"), tl.float32)
    sums = tl.zeros((tile_rows,), tl.float32)
    values = tl.zeros((tile_rows, tile_dim), tl.float32)
    for block in range(start, stop, shape.block_keys):
        positions = block + keys
        is_key = positions < stop
        if shape.has_window:
            is_key &= positions >= first_key
        if shape.has_whole_blocks:
            page = tl.load(row_pages + block // shape.page_size).to(tl.int64)
            tokens = page * shape.page_size + block % shape.page_size + keys
        else:
            pages = tl.load(row_pages + positions // shape.page_size, mask=is_key, other=0)
            tokens = pages.to(tl.int64) * shape.page_size + positions % shape.page_size
        offsets = (tokens * shape.kv_heads + kv_head)[:, None] * shape.head_dim + dims[None, :]
        # Every page in the table exists: keys past the end may be loaded, their scores are hidden.
        # Values past the end are multiplied by 0, and what is stale there may be NaN.
        if tile_dim == shape.head_dim:
            k = tl.load(k_pages + offsets)
            v = tl.load(v_pages + offsets, mask=is_key[:, None], other=0.0)
        else:
            is_dim = (dims < shape.head_dim)[None, :]
            k = tl.load(k_pages + offsets, mask=is_dim, other=0.0)
            v = tl.load(v_pages + offsets, mask=is_key[:, None] & is_dim, other=0.0)
        scores = tl.dot(queries, tl.trans(k)) * to_log2
        if shape.has_cap:
            scores = cap_log2 * (2.0 * tl.sigmoid(2.0 * scores / cap_log2) - 1.0)
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        new_maxima = tl.maximum(maxima, tl.max(scores, 1))
        rescale = tl.exp2(maxima - new_maxima)
        weights = tl.exp2(scores - new_maxima[:, None])
        sums = sums * rescale + tl.sum(weights, 1)
        values = values * rescale[:, None] + tl.dot(weights.to(v.dtype), v)
        maxima = new_maxima
    return maxima, sums, values


def _store_partial(
    partial: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,
    shape: tl.constexpr,
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
    """The chunks' partial results as one: maxima, sums, unnormalised values of the group."""
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
        part_maxima = tl.load(stats, mask=is_stat, other=-float("inf"))
        part_sums = tl.load(stats + shape.group, mask=is_stat, other=0.0)
        part_values = tl.load(
            at[:, None, None] + 2 * shape.group + cells[None, :, :],
            mask=is_chunk[:, None, None] & is_cell[None, :, :],
            other=0.0,
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


def _attend_chunk(  # noqa: PLR0913
    q: tl.tensor,
    q_row_stride: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    page_table: tl.tensor,
    page_table_stride: tl.tensor,
    cache_seqlens: tl.tensor,
    plan: tl.tensor,
    sinks: tl.tensor,
    partials: tl.tensor,
    out: tl.tensor,
    max_items: tl.tensor,
    window: tl.tensor,
    scaling: tl.tensor,
    logit_cap: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Program (chunk, KV head). Arguments as PagedDecode.attend passes them."""
    gdc_launch_dependents()
    gdc_wait()
    item = tl.program_id(0)
    head = tl.program_id(1)
    chunk = plan + PLAN_HEADER + item * CHUNK_FIELDS
    row, start = tl.load(chunk), tl.load(chunk + 1)
    stop, num_chunks = tl.load(chunk + 2), tl.load(chunk + 3)
    if item < tl.load(plan):
        first_key = 0
        if shape.has_window:
            first_key = tl.load(cache_seqlens + row) - window
        row64 = row.to(tl.int64)
        heads = tl.arange(0, shape.tile_rows)
        dims = tl.arange(0, shape.tile_dim)
        cells = (head * shape.group + heads)[:, None] * shape.head_dim + dims[None, :]
        is_cell = (heads < shape.group)[:, None] & (dims < shape.head_dim)[None, :]
        queries = tl.load(q + row64 * q_row_stride + cells, mask=is_cell, other=0.0)
        pages = page_table + row64 * page_table_stride
        to_log2 = scaling * LOG2_E
        cap = logit_cap * LOG2_E
        maxima, sums, values = sweep_keys(
            queries, k_pages, v_pages, pages, head, first_key, start, stop, to_log2, cap, shape
        )
        if num_chunks == 1:
            at = out + (row64 * shape.kv_heads + head) * (shape.group * shape.head_dim)
            sink = sinks + head * shape.group
            write_out(at, sink, maxima, sums, values, shape.tile_rows, shape)
        else:
            index = (item * shape.kv_heads + head).to(tl.int64)
            store_partial(partials + index * shape.partial_size, maxima, sums, values, shape)


def _join_row(
    plan: tl.tensor,
    sinks: tl.tensor,
    partials: tl.tensor,
    out: tl.tensor,
    max_items: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Program (row, KV head): rows of several chunks; the others are done."""
    gdc_launch_dependents()
    gdc_wait()
    row = tl.program_id(0)
    head = tl.program_id(1)
    of_row = plan + PLAN_HEADER + max_items * CHUNK_FIELDS + row * ROW_FIELDS
    first_item, num_chunks = tl.load(of_row), tl.load(of_row + 1)
    if num_chunks > 1:
        index = (first_item * shape.kv_heads + head).to(tl.int64)
        stride: tl.constexpr = shape.kv_heads * shape.partial_size
        first = partials + index * shape.partial_size
        maxima, sums, values = join_chunks(first, num_chunks, stride, shape)
        at = out + (row.to(tl.int64) * shape.kv_heads + head) * (shape.group * shape.head_dim)
        write_out(at, sinks + head * shape.group, maxima, sums, values, shape.tile_group, shape)


# Values that change from step to step must not make Triton compile a variant each.
_STEP_VALUES = ("cache_seqlens", "max_items", "window")
_PLAN_VALUES = (*_STEP_VALUES, "num_rows")
_TABLE_VALUES = (*_STEP_VALUES, "page_table", "page_table_stride")
_JOIN_VALUES = ("max_items",)

plan_chunks_kernel = triton.jit(
    _plan_chunks, do_not_specialize=_PLAN_VALUES, do_not_specialize_on_alignment=_PLAN_VALUES
)
attend_chunk_kernel = triton.jit(
    _attend_chunk, do_not_specialize=_TABLE_VALUES, do_not_specialize_on_alignment=_TABLE_VALUES
)
join_row_kernel = triton.jit(
    _join_row, do_not_specialize=_JOIN_VALUES, do_not_specialize_on_alignment=_JOIN_VALUES
)
