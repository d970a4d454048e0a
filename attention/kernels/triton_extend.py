"""Triton: attention of rows with any number of new tokens over paged K and V.

FlashAttention's forward pass (Dao et al., 2022) over a page table. A row's pairs of a new token and
a query head of one KV head are one matrix, cut into tiles; programs find their tile by the rows'
cumulative lengths on the device, so that nothing is uploaded. Several programs may share a tile's
keys (Flash-Decoding, 2023); join_splits_kernel then joins what they hand in. Knows no batch and no
pool; paged_extend.py launches it. Imports Triton.

Everywhere: shape is an ExtendShape, known when the kernel is compiled.
"""

from __future__ import annotations

import triton
import triton.language as tl

from attention.kernels.triton_extend_parts import LOG2_E, sweep


def _find_tile(
    cu_seqlens_q: tl.tensor, num_rows: tl.tensor, tile: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """The row that has the tile, and which of its tiles it is.

    Row i's tiles begin at its first pair // tile_rows + i: never before the previous row's end.
    """
    low = tl.zeros((), tl.int32)
    high = num_rows.to(tl.int32)
    first_token = tl.load(cu_seqlens_q)
    while high - low > 1:
        middle = (low + high) // 2
        pairs = (tl.load(cu_seqlens_q + middle) - first_token) * shape.group
        is_after = pairs // shape.tile_rows + middle <= tile
        low = tl.where(is_after, middle, low)
        high = tl.where(is_after, high, middle)
    pairs = (tl.load(cu_seqlens_q + low) - first_token) * shape.group
    return low, tile - (pairs // shape.tile_rows + low)


find_tile = triton.jit(_find_tile)


def _load_pairs(
    q: tl.tensor,
    token_stride: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    is_pair: tl.tensor,
    dim: tl.constexpr,
    tile_dim: tl.constexpr,
) -> tl.tensor:
    """(tile_rows, tile_dim): the pairs' queries, zeros past dim and for what is no pair."""
    dims = tl.arange(0, tile_dim)
    at = q + (tokens * token_stride + heads * dim)[:, None] + dims[None, :]
    return tl.load(at, mask=is_pair[:, None] & (dims < dim)[None, :], other=0.0)


load_pairs = triton.jit(_load_pairs)


def _tile_keys(
    first_place: tl.tensor,
    last_place: tl.tensor,
    prefix_len: tl.tensor,
    seq_len: tl.tensor,
    highs: tl.tensor,
    window: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """start, whole, stop: the first key that a pair of the tile may see, a block's first; where the
    keys end that all of its pairs see, at a block's end; where the keys end that any sees."""
    start = tl.zeros((), tl.int32)
    whole, stop = first_place + 1, last_place + 1
    if shape.is_tree:
        whole, stop = prefix_len, seq_len
    if shape.is_items:
        whole = tl.minimum(tl.min(highs), whole)
    if shape.is_everything:
        whole, stop = seq_len, seq_len
    if shape.has_window:
        whole = start
        if shape.is_tree:
            # No draft stands before the prefix's end.
            start = tl.maximum(prefix_len - window + 1, 0)
        elif not shape.is_items:
            start = tl.maximum(first_place - window + 1, 0)
        if shape.is_everything:
            stop = last_place + window
    start = start // shape.block_keys * shape.block_keys
    whole = tl.maximum(whole // shape.block_keys * shape.block_keys, start)
    return start, whole, tl.minimum(stop, seq_len)


tile_keys = triton.jit(_tile_keys)


def _hand_in(  # noqa: PLR0913
    maxima: tl.tensor,
    sums: tl.tensor,
    values: tl.tensor,
    cell: tl.tensor,
    heads: tl.tensor,
    is_pair: tl.tensor,
    num_tokens: tl.tensor,
    partials: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Store the pairs' results, or where the tile's keys are split the part that this program has:
    maximum (base 2), sum and unnormalised values. cell: token * query heads + head, int64."""
    dims = tl.arange(0, shape.tile_v_dim)
    is_cell = is_pair[:, None] & (dims < shape.v_head_dim)[None, :]
    if shape.is_split:
        part = tl.program_id(2).to(tl.int64) * num_tokens * (shape.kv_heads * shape.group)
        at = partials + (part + cell) * (shape.v_head_dim + 2)
        tl.store(at, maxima, mask=is_pair)
        tl.store(at + 1, sums, mask=is_pair)
        tl.store(at[:, None] + 2 + dims[None, :], values, mask=is_cell)
    else:
        if shape.has_sinks:
            sink = tl.load(sinks + heads).to(tl.float32) * LOG2_E
            new_maxima = tl.maximum(maxima, sink)
            rescale = tl.exp2(maxima - new_maxima)
            sums = sums * rescale + tl.exp2(sink - new_maxima)
            values = values * rescale[:, None]
        result = values / tl.where(sums > 0.0, sums, 1.0)[:, None]
        at_out = out + cell[:, None] * shape.v_head_dim + dims[None, :]
        tl.store(at_out, result.to(out.dtype.element_ty), mask=is_cell)


hand_in = triton.jit(_hand_in)


def _sweep_tile(
    tile: tl.tensor,
    row: tl.tensor,
    memory: tl.tensor,
    rule: tl.tensor,
    bounds: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Maxima, sums and values of a tile over the part of its keys that this program has. bounds: as
    tile_keys gives them."""
    start, whole, stop = bounds
    if shape.is_split:
        blocks = tl.cdiv(tl.cdiv(stop - start, shape.block_keys), tl.num_programs(2))
        start += tl.program_id(2) * blocks * shape.block_keys
        stop = tl.minimum(stop, start + blocks * shape.block_keys)
    whole = tl.maximum(tl.minimum(whole, stop // shape.block_keys * shape.block_keys), start)
    if shape.masks_all:
        whole = start
    maxima = tl.full((shape.tile_rows,), -float("inf"), tl.float32)
    sums = tl.full((shape.tile_rows,), 0.0, tl.float32)
    values = tl.full((shape.tile_rows, shape.tile_v_dim), 0.0, tl.float32)
    state = (maxima, sums, values)
    state = sweep(state, tile, row, memory, rule, start, whole, False, shape)
    if shape.is_items:
        # Nobody in the tile sees what lies between the shared keys and its first own one.
        lows, highs = tile[4], tile[5]
        shared_stop = tl.maximum(tl.minimum(tl.max(highs), stop), whole)
        state = sweep(state, tile, row, memory, rule, whole, shared_stop, True, shape)
        reached = tl.cdiv(shared_stop, shape.block_keys) * shape.block_keys
        whole = tl.maximum(tl.min(lows) // shape.block_keys * shape.block_keys, reached)
    return sweep(state, tile, row, memory, rule, whole, stop, True, shape)


sweep_tile = triton.jit(_sweep_tile)


def _pair_facts(  # noqa: PLR0913
    tokens: tl.tensor,
    new: tl.tensor,
    num_new: tl.tensor,
    places: tl.tensor,
    row: tl.tensor,
    positions: tl.tensor,
    mask_starts: tl.tensor,
    shared_keys: tl.tensor,
    first_own: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Positions, lows, highs and cells of the pairs, where the step has them."""
    stands, lows, highs, cells = places, places, places, places
    if shape.has_window and (shape.is_tree or shape.is_items):
        stands = tl.load(positions + tokens).to(tl.int32)
    if shape.is_tree:
        cells = tl.load(mask_starts + row) + new * num_new
    if shape.is_items:
        lows = tl.load(first_own + tokens)
        highs = tl.load(shared_keys + tokens)
    return stands, lows, highs, cells


pair_facts = triton.jit(_pair_facts)


def _attend_pairs(  # noqa: PLR0913
    queries: tl.tensor,
    rope_queries: tl.tensor,
    pairs: tl.tensor,
    lengths: tl.tensor,
    facts: tl.tensor,
    row: tl.tensor,
    memory: tl.tensor,
    rule: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """pairs: the tile's first, how many the row has, their tokens' places. lengths: of the prefix
    and of the row. facts: as pair_facts gives them."""
    first_pair, num_pairs, places = pairs
    prefix_len, seq_len = lengths
    stands, lows, highs, cells = facts
    last_pair = tl.minimum(first_pair + shape.tile_rows, num_pairs) - 1
    bounds = tile_keys(
        prefix_len + first_pair // shape.group, prefix_len + last_pair // shape.group,
        prefix_len, seq_len, highs, rule[0], shape,
    )  # fmt: skip
    tile = (queries, rope_queries, places, stands, lows, highs, cells)
    return sweep_tile(tile, row, memory, rule, bounds, shape)


attend_pairs = triton.jit(_attend_pairs)


def _attend_tile(  # noqa: PLR0913
    q: tl.tensor,
    memory: tl.tensor,
    row: tl.tensor,
    masks: tl.tensor,
    span: tl.tensor,
    rule: tl.tensor,
    v_scale: tl.tensor,
    results: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """q: queries, their tokens' stride, rotated parts and their stride. row: its number, pages and
    keys. masks: as pair_facts reads them. span: the tile's first pair, the row's pairs, its new
    tokens and the first of them in the step. results: where hand_in stores, and the step's tokens.
    """
    queries, q_stride, q_rope, rope_stride = q
    number, row_pages, seq_len = row
    positions, tree, mask_starts, shared_keys, first_own = masks
    first_pair, num_pairs, num_new, first_token = span
    partials, sinks, out, num_tokens = results
    # A row that pads a batch has a new token and no key: its output is zero.
    prefix_len = tl.maximum(seq_len - num_new, 0)
    pairs = first_pair + tl.arange(0, shape.tile_rows)
    is_pair = pairs < num_pairs
    # Pairs past the row's end stand for its last token: nothing of them is stored.
    new = tl.minimum(pairs // shape.group, num_new - 1)
    heads = memory[2] * shape.group + pairs % shape.group
    tokens = (first_token + new).to(tl.int64)
    own = load_pairs(queries, q_stride, tokens, heads, is_pair, shape.head_dim, shape.tile_dim)
    rotated = own
    if shape.rope_dim > 0:
        rotated = load_pairs(
            q_rope, rope_stride, tokens, heads, is_pair, shape.rope_dim, shape.tile_rope_dim
        )
    places = prefix_len + new
    facts = pair_facts(
        tokens, new, num_new, places, number, positions, mask_starts, shared_keys, first_own, shape
    )
    seen_row = (row_pages, positions + first_token, tree, prefix_len, seq_len)
    spread = (first_pair, num_pairs, places)
    maxima, sums, values = attend_pairs(
        own, rotated, spread, (prefix_len, seq_len), facts, seen_row, memory, rule, shape
    )
    cell = tokens * (shape.kv_heads * shape.group) + heads
    hand_in(
        maxima, sums, values * v_scale, cell, heads, is_pair, num_tokens, partials, sinks, out,
        shape,
    )  # fmt: skip


attend_tile = triton.jit(_attend_tile)


def _attend_extend(  # noqa: PLR0913
    q: tl.tensor,
    q_token_stride: tl.tensor,
    q_rope: tl.tensor,
    q_rope_token_stride: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    page_table: tl.tensor,
    page_table_stride: tl.tensor,
    cu_seqlens_q: tl.tensor,
    cache_seqlens: tl.tensor,
    positions: tl.tensor,
    masks: tl.tensor,
    mask_starts: tl.tensor,
    shared_keys: tl.tensor,
    first_own: tl.tensor,
    kv_scales: tl.tensor,
    sinks: tl.tensor,
    partials: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    window: tl.tensor,
    scaling: tl.tensor,
    logit_cap: tl.tensor,
    shape: tl.constexpr,
) -> None:
    """Program (tile, KV head, part of the keys). Arguments as PagedExtend.attend passes them.

    The last tiles of a row, which see most, come first: what starts last ends soonest.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    number, row_tile = find_tile(cu_seqlens_q, num_rows, tile, shape)
    first_token = tl.load(cu_seqlens_q + number)
    num_new = tl.load(cu_seqlens_q + number + 1) - first_token
    num_pairs = num_new * shape.group
    first_pair = row_tile * shape.tile_rows
    if first_pair < num_pairs:
        to_log2, v_scale = scaling * LOG2_E, 1.0
        if shape.is_e4m3:
            to_log2 *= tl.load(kv_scales)
            v_scale = tl.load(kv_scales + 1)
        row_pages = page_table + number.to(tl.int64) * page_table_stride
        attend_tile(
            (q, q_token_stride, q_rope, q_rope_token_stride),
            (k_pages, v_pages, tl.program_id(1)),
            (number, row_pages, tl.load(cache_seqlens + number)),
            (positions, masks, mask_starts, shared_keys, first_own),
            (first_pair, num_pairs, num_new, first_token),
            (window, to_log2, logit_cap * LOG2_E),
            v_scale,
            (partials, sinks, out, num_tokens),
            shape,
        )


def _join_splits(  # noqa: PLR0913
    partials: tl.tensor,
    cu_seqlens_q: tl.tensor,
    sinks: tl.tensor,
    out: tl.tensor,
    num_rows: tl.tensor,
    num_tokens: tl.tensor,
    num_splits: tl.tensor,
    block_splits: tl.constexpr,
    shape: tl.constexpr,
) -> None:
    """Program (new token, query head): what the parts of its keys gave, as one. Tokens of no row
    have no parts."""
    token, head = tl.program_id(0), tl.program_id(1)
    if (token >= tl.load(cu_seqlens_q)) & (token < tl.load(cu_seqlens_q + num_rows)):
        num_heads: tl.constexpr = shape.kv_heads * shape.group
        cell = token.to(tl.int64) * num_heads + head
        splits = tl.arange(0, block_splits)
        dims = tl.arange(0, shape.tile_v_dim)
        is_split = splits < num_splits
        parts = splits.to(tl.int64) * num_tokens * num_heads
        at = partials + (parts + cell) * (shape.v_head_dim + 2)
        maxima = tl.load(at, mask=is_split, other=-float("inf"))
        sums = tl.load(at + 1, mask=is_split, other=0.0)
        is_cell = is_split[:, None] & (dims < shape.v_head_dim)[None, :]
        values = tl.load(at[:, None] + 2 + dims[None, :], mask=is_cell, other=0.0)
        peak = tl.max(maxima, 0)
        if shape.has_sinks:
            sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
            peak = tl.maximum(peak, sink)
        base = tl.where(peak == -float("inf"), 0.0, peak)
        weights = tl.exp2(maxima - base)
        total = tl.sum(sums * weights, 0)
        if shape.has_sinks:
            total += tl.exp2(sink - base)
        result = tl.sum(values * weights[:, None], 0) / tl.where(total > 0.0, total, 1.0)
        at_out = out + cell * shape.v_head_dim + dims
        tl.store(at_out, result.to(out.dtype.element_ty), mask=dims < shape.v_head_dim)


# Values that change from step to step must not make Triton compile a variant each.
_STEP_VALUES = (
    "page_table",
    "page_table_stride",
    "cu_seqlens_q",
    "cache_seqlens",
    "positions",
    "masks",
    "mask_starts",
    "shared_keys",
    "first_own",
    "kv_scales",
    "num_rows",
    "num_tokens",
    "window",
)
_JOIN_VALUES = ("cu_seqlens_q", "num_rows", "num_tokens", "num_splits")

attend_extend_kernel = triton.jit(
    _attend_extend,
    do_not_specialize=_STEP_VALUES,
    do_not_specialize_on_alignment=_STEP_VALUES,
)
join_splits_kernel = triton.jit(
    _join_splits, do_not_specialize=_JOIN_VALUES, do_not_specialize_on_alignment=_JOIN_VALUES
)
