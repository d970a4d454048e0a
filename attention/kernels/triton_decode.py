"""Triton: attention of one query a row over paged K and V, with rows cut into even chunks.

Flash-decoding (Dao et al., 2023) with a plan (triton_decode_plan.py) made once a step, on the
device, so that a batch of unlike rows loads the multiprocessors evenly. A row of one chunk is done
in one go; of the others, the program that ends last joins the chunks. Query heads that share a KV
head are one tile. One kernel takes rotated queries over stored keys; the other begins with the QKV
projection and stores the new key and value too. Knows no batch and no pool; paged_decode.py
launches it. Imports Triton.

Everywhere: shape is a DecodeShape and front a FrontShape, known when the kernel is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from attention.kernels.triton_decode_front import finish_token, load_block, prefetch_keys
from attention.kernels.triton_decode_parts import LOG2_E, add_block, hand_in, sweep_keys
from attention.kernels.triton_decode_plan import CHUNK_FIELDS, PLAN_HEADER, read_chunk


def _attend_chunk(  # noqa: PLR0913
    q: tl.tensor,
    q_row_stride: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    page_table: tl.tensor,
    page_table_stride: tl.tensor,
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
    """Program (KV head, chunk). Arguments as PagedDecode.attend passes them."""
    if shape.is_dependent:
        gdc_launch_dependents()
        gdc_wait()
    item, head = tl.program_id(1), tl.program_id(0)
    row, start, stop, num_chunks, first_item, seq_len = read_chunk(plan, item)
    if item < tl.load(plan):
        tile_rows: tl.constexpr = shape.tile_rows
        tile_dim: tl.constexpr = shape.tile_dim
        block_keys: tl.constexpr = shape.block_keys
        row64 = row.to(tl.int64)
        heads = tl.arange(0, tile_rows)
        dims = tl.arange(0, tile_dim)
        cells = (head * shape.group + heads)[:, None] * shape.head_dim + dims[None, :]
        is_cell = (heads < shape.group)[:, None] & (dims < shape.head_dim)[None, :]
        queries = tl.load(q + row64 * q_row_stride + cells, mask=is_cell, other=0.0)
        maxima = tl.full((tile_rows,), -float("inf"), tl.float32)
        sums = tl.zeros((tile_rows, block_keys), tl.float32)
        values = tl.zeros((tile_rows, tile_dim), tl.float32)
        pages = page_table + row64 * page_table_stride
        maxima, sums, values = sweep_keys(
            queries, maxima, sums, values, k_pages, v_pages, pages, head, seq_len - window,
            start, stop, scaling * LOG2_E, logit_cap * LOG2_E, shape,
        )  # fmt: skip
        hand_in(
            maxima, sums, values, item, first_item, num_chunks, row64, head, partials,
            plan + PLAN_HEADER + max_items * CHUNK_FIELDS, out, sinks, shape,
        )  # fmt: skip


def _attend_projected(  # noqa: PLR0913
    projected: tl.tensor,
    split_stride: tl.tensor,
    bias: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    eps: tl.tensor,
    cos_sin: tl.tensor,
    out_cache_loc: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    page_table: tl.tensor,
    page_table_stride: tl.tensor,
    plan: tl.tensor,
    sinks: tl.tensor,
    partials: tl.tensor,
    out: tl.tensor,
    max_items: tl.tensor,
    window: tl.tensor,
    scaling: tl.tensor,
    logit_cap: tl.tensor,
    shape: tl.constexpr,
    front: tl.constexpr,
) -> None:
    """Program (KV head, chunk). Arguments as PagedDecode.attend_projected passes them.

    The program of a row's last chunk also finishes, stores and counts the new key and value. The
    plan, the page table and earlier steps' keys are complete before the projection is: read early.
    """
    gdc_launch_dependents()
    item, head = tl.program_id(1), tl.program_id(0)
    row, start, stop, num_chunks, first_item, seq_len = read_chunk(plan, item)
    if item < tl.load(plan):
        row64 = row.to(tl.int64)
        pages = page_table + row64 * page_table_stride
        stored_stop, first_key = tl.minimum(stop, seq_len - 1), seq_len - window
        prefetch_keys(k_pages, v_pages, pages, head, start, stored_stop, front, shape)
        if front.loads_early:
            first_k, first_v = load_block(k_pages, v_pages, pages, head, start, stored_stop, shape)
        to_log2, cap_log2 = scaling * LOG2_E, logit_cap * LOG2_E
        queries, maxima, sums, values = finish_token(
            projected, split_stride, bias, q_norm, k_norm, eps, cos_sin, out_cache_loc, k_pages,
            v_pages, row64, head, seq_len, stop == seq_len, to_log2, cap_log2, front, shape,
        )  # fmt: skip
        if front.loads_early:
            if start < stored_stop:
                maxima, sums, values = add_block(
                    queries, first_k, first_v, start, first_key, stored_stop, maxima, sums, values,
                    to_log2, cap_log2, shape,
                )  # fmt: skip
            start += shape.block_keys
        maxima, sums, values = sweep_keys(
            queries, maxima, sums, values, k_pages, v_pages, pages, head, first_key,
            start, stored_stop, to_log2, cap_log2, shape,
        )  # fmt: skip
        hand_in(
            maxima, sums, values, item, first_item, num_chunks, row64, head, partials,
            plan + PLAN_HEADER + max_items * CHUNK_FIELDS, out, sinks, shape,
        )  # fmt: skip


# Values that change from step to step must not make Triton compile a variant each.
_STEP_VALUES = ("plan", "max_items", "window", "page_table", "page_table_stride")
_PROJECTED_VALUES = (*_STEP_VALUES, "out_cache_loc")

attend_chunk_kernel = triton.jit(
    _attend_chunk, do_not_specialize=_STEP_VALUES, do_not_specialize_on_alignment=_STEP_VALUES
)
attend_projected_kernel = triton.jit(
    _attend_projected,
    do_not_specialize=_PROJECTED_VALUES,
    do_not_specialize_on_alignment=_PROJECTED_VALUES,
)
