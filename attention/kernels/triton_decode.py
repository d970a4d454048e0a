"""Triton: attention of one query a row over paged K and V, with rows cut into even chunks.

Flash-decoding (Dao et al., 2023) with two changes. A plan made once a step on the device settles
the chunks, so that a batch of unlike rows loads the multiprocessors evenly; and the last chunk of a
row to finish joins the others' results, so that a layer is one launch. Query heads that share a KV
head are one tile. Knows no batch and no pool; triton_decode_launch.py calls it. Imports Triton.

A plan is int32: tokens of a chunk, number of chunks; each chunk's row (max_items); each row's first
chunk (bs); how many chunks of each row and KV head have finished (bs * kv_heads), which every layer
leaves at 0. A chunk's partial result is float32: a maximum and a sum of each head of the group (base
2, relative to that maximum), then its unnormalised values.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

LOG2_E = tl.constexpr(1.4426950408889634)
PLAN_HEADER = tl.constexpr(2)


def _plan_chunks(  # noqa: PLR0913
    cache_seqlens: tl.tensor,
    plan: tl.tensor,
    num_rows: tl.tensor,
    max_items: tl.tensor,
    window: tl.tensor,
    target_chunks: tl.tensor,
    kv_heads: tl.constexpr,
    min_chunk: tl.constexpr,
    block_keys: tl.constexpr,
    block_rows: tl.constexpr,
) -> None:
    """One program. A row without keys is one empty chunk, which writes zeros."""
    gdc_wait()
    rows = tl.arange(0, block_rows)
    is_row = rows < num_rows
    seq_lens = tl.load(cache_seqlens + rows, mask=is_row, other=0)
    first_keys = tl.maximum(seq_lens - window, 0) // block_keys * block_keys
    lengths = seq_lens - first_keys
    chunk = tl.cdiv(tl.cdiv(tl.sum(lengths), target_chunks), block_keys) * block_keys
    chunk = tl.maximum(chunk, min_chunk)
    num_chunks = tl.where(is_row, tl.maximum(tl.cdiv(lengths, chunk), 1), 0)
    first_items = tl.cumsum(num_chunks) - num_chunks
    tl.store(plan, chunk)
    tl.store(plan + 1, tl.sum(num_chunks))
    row_of_item = plan + PLAN_HEADER
    for i in range(0, tl.max(num_chunks)):
        tl.store(row_of_item + first_items + i, rows, mask=i < num_chunks)
    tl.store(row_of_item + max_items + rows, first_items, mask=is_row)
    finished = row_of_item + max_items + num_rows
    for head in range(kv_heads):
        tl.store(finished + rows * kv_heads + head, tl.zeros_like(rows), mask=is_row)


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
    has_cap: tl.constexpr,
    page_size: tl.constexpr,
    kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_dim: tl.constexpr,
    block_keys: tl.constexpr,
) -> tl.tensor:
    """Keys start .. stop - 1 that are not before first_key: maxima, sums, unnormalised values."""
    dims = tl.arange(0, tile_dim)
    keys = tl.arange(0, block_keys)
    maxima = tl.full((tile_rows,), -float("inf"), tl.float32)
    sums = tl.zeros((tile_rows,), tl.float32)
    values = tl.zeros((tile_rows, tile_dim), tl.float32)
    for block in range(start, stop, block_keys):
        positions = block + keys
        is_key = (positions >= first_key) & (positions < stop)
        if page_size % block_keys == 0:
            page = tl.load(row_pages + block // page_size).to(tl.int64)
            tokens = page * page_size + block % page_size + keys
        else:
            pages = tl.load(row_pages + positions // page_size, mask=is_key, other=0)
            tokens = pages.to(tl.int64) * page_size + positions % page_size
        offsets = (tokens * kv_heads + kv_head)[:, None] * head_dim + dims[None, :]
        is_loaded = is_key[:, None] & (dims < head_dim)[None, :]
        k = tl.load(k_pages + offsets, mask=is_loaded, other=0.0).to(queries.dtype)
        v = tl.load(v_pages + offsets, mask=is_loaded, other=0.0).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(k)) * to_log2
        if has_cap:
            scores = cap_log2 * (2.0 * tl.sigmoid(2.0 * scores / cap_log2) - 1.0)
        scores = tl.where(is_key[None, :], scores, -float("inf"))
        new_maxima = tl.maximum(maxima, tl.max(scores, 1))
        rescale = tl.exp2(maxima - new_maxima)
        weights = tl.exp2(scores - new_maxima[:, None])
        sums = sums * rescale + tl.sum(weights, 1)
        values = values * rescale[:, None] + tl.dot(weights.to(v.dtype), v)
        maxima = new_maxima
    return maxima, sums, values


def _join_chunks(
    partials: tl.tensor,
    num_chunks: tl.tensor,
    chunk_stride: tl.tensor,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    tile_group: tl.constexpr,
    tile_dim: tl.constexpr,
    block_chunks: tl.constexpr,
) -> tl.tensor:
    """The chunks' partial results as one: maxima, sums, unnormalised values of the group."""
    heads = tl.arange(0, tile_group)
    dims = tl.arange(0, tile_dim)
    is_head = heads < group
    cells = heads[:, None] * head_dim + dims[None, :]
    is_cell = is_head[:, None] & (dims < head_dim)[None, :]
    maxima = tl.full((tile_group,), -float("inf"), tl.float32)
    sums = tl.zeros((tile_group,), tl.float32)
    values = tl.zeros((tile_group, tile_dim), tl.float32)
    for block in range(0, num_chunks, block_chunks):
        chunks = block + tl.arange(0, block_chunks)
        is_chunk = chunks < num_chunks
        at = partials + chunks.to(tl.int64) * chunk_stride
        is_stat = is_chunk[:, None] & is_head[None, :]
        stats = at[:, None] + heads[None, :]
        # Other multiprocessors wrote these: not through the first-level cache.
        part_maxima = tl.load(stats, mask=is_stat, other=-float("inf"), cache_modifier=".cg")
        part_sums = tl.load(stats + group, mask=is_stat, other=0.0, cache_modifier=".cg")
        part_values = tl.load(
            at[:, None, None] + 2 * group + cells[None, :, :],
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
    v_scale: tl.tensor,
    has_sinks: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_dim: tl.constexpr,
) -> None:
    """Normalise the group's values and store them; zeros where there was no key."""
    heads = tl.arange(0, tile_rows)
    dims = tl.arange(0, tile_dim)
    is_head = heads < group
    if has_sinks:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32) * LOG2_E
        new_maxima = tl.maximum(maxima, sink)
        rescale = tl.exp2(maxima - new_maxima)
        sums = sums * rescale + tl.exp2(sink - new_maxima)
        values = values * rescale[:, None]
    share = v_scale / tl.where(sums > 0.0, sums, 1.0)
    result = (values * share[:, None]).to(out.dtype.element_ty)
    cells = heads[:, None] * head_dim + dims[None, :]
    tl.store(out + cells, result, mask=is_head[:, None] & (dims < head_dim)[None, :])


sweep_keys = triton.jit(_sweep_keys)
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
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    sinks: tl.tensor,
    partials: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    max_items: tl.tensor,
    window: tl.tensor,
    scaling: tl.tensor,
    logit_cap: tl.tensor,
    has_cap: tl.constexpr,
    has_sinks: tl.constexpr,
    page_size: tl.constexpr,
    kv_heads: tl.constexpr,
    group: tl.constexpr,
    head_dim: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_group: tl.constexpr,
    tile_dim: tl.constexpr,
    block_keys: tl.constexpr,
    block_chunks: tl.constexpr,
) -> None:
    """Program (KV head, chunk)."""
    gdc_launch_dependents()
    gdc_wait()
    kv_head = tl.program_id(0)
    item = tl.program_id(1)
    if item >= tl.load(plan + 1):
        return
    chunk = tl.load(plan)
    row = tl.load(plan + PLAN_HEADER + item)
    first_item = tl.load(plan + PLAN_HEADER + max_items + row)
    seq_len = tl.load(cache_seqlens + row)
    first_key = tl.maximum(seq_len - window, 0)
    first_block = first_key // block_keys * block_keys
    num_chunks = tl.maximum(tl.cdiv(seq_len - first_block, chunk), 1)
    start = first_block + (item - first_item) * chunk
    row64 = row.to(tl.int64)
    heads = tl.arange(0, tile_rows)
    dims = tl.arange(0, tile_dim)
    cells = heads[:, None] * head_dim + dims[None, :]
    is_cell = (heads < group)[:, None] & (dims < head_dim)[None, :]
    q_group = q + row64 * q_row_stride + kv_head * (group * head_dim)
    queries = tl.load(q_group + cells, mask=is_cell, other=0.0)
    maxima, sums, values = sweep_keys(
        queries,
        k_pages,
        v_pages,
        page_table + row64 * page_table_stride,
        kv_head,
        first_key,
        start,
        tl.minimum(start + chunk, seq_len),
        scaling * tl.load(k_scale) * LOG2_E,
        logit_cap * LOG2_E,
        has_cap,
        page_size,
        kv_heads,
        head_dim,
        tile_rows,
        tile_dim,
        block_keys,
    )
    group_out = out + (row64 * kv_heads + kv_head) * (group * head_dim)
    group_sinks = sinks + kv_head * group
    if num_chunks == 1:
        write_out(
            group_out,
            group_sinks,
            maxima,
            sums,
            values,
            tl.load(v_scale),
            has_sinks,
            group,
            head_dim,
            tile_rows,
            tile_dim,
        )
        return
    stride: tl.constexpr = group * (head_dim + 2)
    partial = partials + (item * kv_heads + kv_head).to(tl.int64) * stride
    tl.store(partial + heads, maxima, mask=heads < group)
    tl.store(partial + group + heads, sums, mask=heads < group)
    tl.store(partial + 2 * group + cells, values, mask=is_cell)
    tl.debug_barrier()
    finished = plan + PLAN_HEADER + max_items + num_rows + row * kv_heads + kv_head
    if tl.atomic_add(finished, 1, sem="acq_rel") < num_chunks - 1:
        return
    tl.debug_barrier()
    tl.store(finished, 0)
    maxima, sums, values = join_chunks(
        partials + (first_item * kv_heads + kv_head).to(tl.int64) * stride,
        num_chunks,
        kv_heads * stride,
        group,
        head_dim,
        tile_group,
        tile_dim,
        block_chunks,
    )
    write_out(
        group_out,
        group_sinks,
        maxima,
        sums,
        values,
        tl.load(v_scale),
        has_sinks,
        group,
        head_dim,
        tile_group,
        tile_dim,
    )


# Values that change from step to step must not make Triton compile a variant each.
_PLAN_STEP_VALUES = ("num_rows", "max_items", "window", "target_chunks")
_STEP_VALUES = ("num_rows", "max_items", "window", "page_table_stride")

plan_chunks_kernel = triton.jit(
    _plan_chunks,
    do_not_specialize=(*_PLAN_STEP_VALUES, "cache_seqlens"),
    do_not_specialize_on_alignment=(*_PLAN_STEP_VALUES, "cache_seqlens"),
)
attend_chunk_kernel = triton.jit(
    _attend_chunk,
    do_not_specialize=(*_STEP_VALUES, "cache_seqlens", "page_table"),
    do_not_specialize_on_alignment=(*_STEP_VALUES, "cache_seqlens", "page_table"),
)
