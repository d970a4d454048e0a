"""Gluon, sm90: causal attention of rows with many new tokens over paged K and V.

FlashAttention-3's division of work (Shah et al., 2024): one warp brings blocks of keys from their
pages to shared memory by TMA, two warpgroups with 64 pairs of a new token and a query head each
multiply them, and one's softmax runs beside the other's products. Tiles are found as the plain
kernel's (triton_extend.py), which has everything that this one has not: windows, caps, sinks,
masks, e4m3 and parts of a tile's keys. Knows no batch and no pool. Imports Triton.

Everywhere: shape is a GluonShape, known when the kernel is compiled.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attention.kernels.gluon_extend_parts import (
    GROUP_ROWS,
    HALF_DIMS,
    attend_rows,
    load_queries,
    score_layout,
    store_rows,
)

LOG2_E = gl.constexpr(1.4426950408889634)
_TILE_ROWS = gl.constexpr(128)
_CONSUMER_REGISTERS = gl.constexpr(240)
_PRODUCER_REGISTERS = gl.constexpr(24)


def _find_tile(
    cu_seqlens_q: gl.tensor, num_rows: gl.tensor, tile: gl.tensor, shape: gl.constexpr
) -> gl.tensor:
    """The row that has the tile, and which of its tiles it is. As the plain kernel's."""
    low, high = tile * 0, num_rows
    first_token = gl.load(cu_seqlens_q)
    while high - low > 1:
        middle = (low + high) // 2
        pairs = (gl.load(cu_seqlens_q + middle) - first_token) * shape.group
        is_after = pairs // _TILE_ROWS + middle <= tile
        low = gl.where(is_after, middle, low)
        high = gl.where(is_after, high, middle)
    pairs = (gl.load(cu_seqlens_q + low) - first_token) * shape.group
    return low, tile - (pairs // _TILE_ROWS + low)


find_tile = gluon.jit(_find_tile)


def _bring(
    pages: gl.tensor,
    rows: gl.tensor,
    column: gl.tensor,
    store: gl.shared_memory_descriptor,
    come: gl.shared_memory_descriptor,
    free: gl.shared_memory_descriptor,
    turn: gl.tensor,
    shape: gl.constexpr,
) -> None:
    """A turn's block to its stage, as soon as that is free. rows: of the pool's tokens, where each
    of the block's boxes begins. column: of their elements, where the head begins."""
    halves: gl.constexpr = shape.head_dim // HALF_DIMS
    boxes: gl.constexpr = shape.block_keys // shape.box_keys
    # The same bytes: a head's half is (block_keys, 64) for itself, and its boxes follow each other.
    view = store._reinterpret(
        store.dtype, [shape.num_stages * halves * boxes, shape.box_keys, HALF_DIMS], store.layout
    )
    stage = turn % shape.num_stages
    mbarrier.wait(free.index(stage), ((turn // shape.num_stages) & 1) ^ 1)
    barrier = come.index(stage)
    mbarrier.expect(barrier, shape.block_keys * shape.head_dim * 2)
    for half in gl.static_range(halves):
        for box in gl.static_range(boxes):
            place = view.index((stage * halves + half) * boxes + box)
            tma.async_copy_global_to_shared(
                pages, [rows[box], column + half * HALF_DIMS], barrier, place
            )


bring = gluon.jit(_bring)


def _box_row(
    row_pages: gl.tensor, key: gl.tensor, last: gl.tensor, shape: gl.constexpr
) -> gl.tensor:
    """Which of the pool's tokens the key is. Past the row's end, one of its last page's."""
    page = gl.load(row_pages + gl.minimum(key, last) // shape.page_size)
    return page * shape.page_size + key % shape.page_size


box_row = gluon.jit(_box_row)


def _box_rows(
    row_pages: gl.tensor, first_key: gl.tensor, last: gl.tensor, shape: gl.constexpr
) -> gl.tensor:
    """_box_row of each of a block's boxes."""
    boxes: gl.constexpr = shape.block_keys // shape.box_keys
    rows = gl.tuple(())
    for box in gl.static_range(boxes):
        rows = rows + (box_row(row_pages, first_key + box * shape.box_keys, last, shape),)
    return rows


box_rows = gluon.jit(_box_rows)


def _produce(  # noqa: PLR0913
    k_pages: gl.tensor,
    v_pages: gl.tensor,
    row_pages: gl.tensor,
    head: gl.tensor,
    num_blocks: gl.tensor,
    seq_len: gl.tensor,
    stores: gl.tensor,
    barriers: gl.tensor,
    shape: gl.constexpr,
) -> None:
    """One warp: all blocks, the row's last first."""
    last = gl.maximum(seq_len - 1, 0)
    column = head * shape.head_dim
    for turn in range(num_blocks):
        # Pages are read before there is room: what they tell is there when it is needed.
        rows = box_rows(row_pages, (num_blocks - 1 - turn) * shape.block_keys, last, shape)
        bring(k_pages, rows, column, stores[0], barriers[0], barriers[1], turn, shape)
        bring(v_pages, rows, column, stores[1], barriers[2], barriers[3], turn, shape)


produce = gluon.jit(_produce)


def _consume(  # noqa: PLR0913
    q: gl.tensor,
    q_token_stride: gl.tensor,
    out: gl.tensor,
    span: gl.tensor,
    lengths: gl.tensor,
    head: gl.tensor,
    num_blocks: gl.tensor,
    to_log2: gl.tensor,
    queries: gl.tensor,
    stores: gl.tensor,
    barriers: gl.tensor,
    part: gl.constexpr,
    shape: gl.constexpr,
) -> None:
    """A warpgroup: 64 of the tile's pairs. span: the tile's first pair and the row's pairs.
    lengths: the row's first token in the step, its prefix, its new tokens, its keys."""
    first_token, prefix_len, num_new, seq_len = lengths
    own = (span[0] + part * GROUP_ROWS, span[1])
    slot = queries.index(part)
    load_queries(q, q_token_stride, first_token, own, head, slot, shape)
    rows: gl.constexpr = gl.SliceLayout(1, score_layout(shape.block_keys))
    pairs = own[0] + gl.arange(0, GROUP_ROWS, rows)
    # Pairs past the row's end stand for its last token: nothing of them is stored.
    places = gl.minimum(prefix_len + gl.minimum(pairs // shape.group, num_new - 1), seq_len - 1)
    seen_by_all = gl.minimum(
        prefix_len + gl.minimum(own[0] // shape.group, num_new - 1) + 1, seq_len
    )
    num_masked = gl.maximum(num_blocks - seen_by_all // shape.block_keys, 1)
    values = attend_rows(
        slot, stores, barriers, places, num_masked, num_blocks, seq_len, to_log2, shape
    )
    store_rows(out, values.to(slot.dtype), first_token, own, head, slot, shape)


consume = gluon.jit(_consume)


def _make_room(pages: gl.tensor, shape: gl.constexpr) -> gl.tensor:
    """queries, stores and barriers, as gluon_extend_parts.py names them. pages: a descriptor."""
    dtype: gl.constexpr = pages.dtype
    layout: gl.constexpr = pages.layout
    size: gl.constexpr = [shape.num_stages, shape.block_keys, shape.head_dim]
    queries = gl.allocate_shared_memory(dtype, [2, GROUP_ROWS, shape.head_dim], layout)
    stores = (
        gl.allocate_shared_memory(dtype, size, layout),
        gl.allocate_shared_memory(dtype, size, layout),
    )
    kind: gl.constexpr = mbarrier.MBarrierLayout()
    barriers = (
        gl.allocate_shared_memory(gl.int64, [shape.num_stages, 1], kind),
        gl.allocate_shared_memory(gl.int64, [shape.num_stages, 1], kind),
        gl.allocate_shared_memory(gl.int64, [shape.num_stages, 1], kind),
        gl.allocate_shared_memory(gl.int64, [shape.num_stages, 1], kind),
    )
    num_stages: gl.constexpr = shape.num_stages
    for stage in gl.static_range(num_stages):
        mbarrier.init(barriers[0].index(stage), count=1)
        mbarrier.init(barriers[1].index(stage), count=2)
        mbarrier.init(barriers[2].index(stage), count=1)
        mbarrier.init(barriers[3].index(stage), count=2)
    fence_async_shared()
    gl.thread_barrier()
    return queries, stores, barriers


make_room = gluon.jit(_make_room)


def _attend(  # noqa: PLR0913
    q: gl.tensor,
    q_token_stride: gl.tensor,
    out: gl.tensor,
    pages: gl.tensor,
    span: gl.tensor,
    lengths: gl.tensor,
    head: gl.tensor,
    to_log2: gl.tensor,
    shape: gl.constexpr,
) -> None:
    """A tile. pages: K's and V's descriptors, and the row's page numbers."""
    k_pages, v_pages, row_pages = pages
    first_pair, num_pairs = span
    _, prefix_len, _, seq_len = lengths
    queries, stores, barriers = make_room(k_pages, shape)
    last_pair = gl.minimum(first_pair + _TILE_ROWS, num_pairs) - 1
    stop = gl.minimum(prefix_len + last_pair // shape.group + 1, seq_len)
    # A row that pads a batch has no key: a block of which it sees nothing gives its zeros.
    num_blocks = gl.maximum(gl.cdiv(stop, shape.block_keys), 1)
    gl.warp_specialize(
        [
            (
                consume,
                (
                    q, q_token_stride, out, span, lengths, head, num_blocks, to_log2, queries,
                    stores, barriers, gl.constexpr(0), shape,
                ),
            ),
            (
                consume,
                (
                    q, q_token_stride, out, span, lengths, head, num_blocks, to_log2, queries,
                    stores, barriers, gl.constexpr(1), shape,
                ),
            ),
            (
                produce,
                (k_pages, v_pages, row_pages, head, num_blocks, seq_len, stores, barriers, shape),
            ),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


attend = gluon.jit(_attend)


def _attend_gluon(  # noqa: PLR0913
    q: gl.tensor,
    q_token_stride: gl.tensor,
    k_pages: gl.tensor,
    v_pages: gl.tensor,
    page_table: gl.tensor,
    page_table_stride: gl.tensor,
    cu_seqlens_q: gl.tensor,
    cache_seqlens: gl.tensor,
    out: gl.tensor,
    num_rows: gl.tensor,
    scaling: gl.tensor,
    shape: gl.constexpr,
) -> None:
    """Program (KV head, tile). Arguments as WarpgroupExtend passes them.

    The last tiles, which see most, come first, of all heads: what starts last ends soonest.
    """
    tile = gl.num_programs(1) - 1 - gl.program_id(1)
    head = gl.program_id(0)
    number, row_tile = find_tile(cu_seqlens_q, num_rows, tile, shape)
    first_token = gl.load(cu_seqlens_q + number)
    num_new = gl.load(cu_seqlens_q + number + 1) - first_token
    seq_len = gl.load(cache_seqlens + number)
    num_pairs = num_new * shape.group
    first_pair = row_tile * _TILE_ROWS
    if first_pair < num_pairs:
        row_pages = page_table + number.to(gl.int64) * page_table_stride
        prefix_len = gl.maximum(seq_len - num_new, 0)
        attend(
            q,
            q_token_stride,
            out,
            (k_pages, v_pages, row_pages),
            (first_pair, num_pairs),
            (first_token, prefix_len, num_new, seq_len),
            head,
            scaling * LOG2_E,
            shape,
        )


# Values that change from step to step must not make Triton compile a variant each.
_STEP_VALUES = ("page_table", "page_table_stride", "cu_seqlens_q", "cache_seqlens", "num_rows")

attend_gluon_kernel = gluon.jit(
    _attend_gluon, do_not_specialize=_STEP_VALUES, do_not_specialize_on_alignment=_STEP_VALUES
)


def describe_pages(pages: torch.Tensor, box_keys: int) -> TensorDescriptor:
    """K or V (num_pages, page_size, kv_heads, head_dim), contiguous, as copies of box_keys tokens
    and half a head of 128 read it."""
    tokens = pages.flatten(0, 1).flatten(1)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    return TensorDescriptor.from_tensor(tokens, [box_keys, HALF_DIMS.value], layout)
