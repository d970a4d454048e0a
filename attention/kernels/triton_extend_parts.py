"""Triton: what the extend kernel does with a tile: which keys it sees, and a sweep over them.

A tile's rows are pairs of a new token and a query head, token by token. Knows no plan and no
launch. Imports Triton.

Everywhere: shape is an ExtendShape, known when the kernel is compiled; place is where a token
stands among its row's tokens, position what the model counts. Four tuples go from hand to hand:

- tile, of its pairs: queries and their rotated parts, places and positions of their tokens; of
  items, where a token's own begins and how many shared keys it sees; of trees, where its mask is.
- row: its pages, positions of its new tokens, masks, length of its prefix, number of its keys.
- memory: pages of K, pages of V, the KV head.
- rule: the window, and factors of scores and of their cap to base 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


def _from_e4m3(raw: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Bytes of e4m3 as dtype, exactly, by way of float16: the same bits behind one more of the
    exponent, whose bias is 8 less. One way for every GPU. NaN, which no pool stores, becomes 480.
    """
    bits = raw.to(tl.uint16)
    half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    return (half.to(tl.float16, bitcast=True) * 256.0).to(dtype)


from_e4m3 = triton.jit(_from_e4m3)


def _visible(
    keys: tl.tensor, tile: tl.tensor, row: tl.tensor, window: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """(tile_rows, block_keys): which of the keys, places of the row, each pair sees."""
    _, _, places, positions, lows, highs, cells = tile
    _, row_positions, masks, prefix_len, seq_len = row
    keys_row = keys[None, :]
    is_key = (keys < seq_len)[None, :]
    if shape.is_tree:
        new = keys - prefix_len
        is_new = (new >= 0) & (keys < seq_len)
        seen = tl.load(masks + cells[:, None] + new[None, :], mask=is_new[None, :], other=0) != 0
        visible = is_key & (seen | (new < 0)[None, :])
        if shape.has_window:
            stands = tl.load(row_positions + new, mask=is_new, other=0).to(tl.int32)
            stands = tl.where(new < 0, keys, stands)
            visible = visible & (stands[None, :] > (positions - window)[:, None])
    elif shape.is_items:
        is_own = keys_row >= lows[:, None]
        visible = (is_own & (keys_row <= places[:, None])) | (keys_row < highs[:, None])
        if shape.has_window:
            own_stands = keys_row + (positions - places)[:, None]
            stands = tl.where(is_own, own_stands, keys_row)
            visible = visible & (stands > (positions - window)[:, None])
    elif shape.is_everything:
        visible = is_key & (places >= 0)[:, None]
        if shape.has_window:
            visible = visible & (keys_row > (places - window)[:, None])
            visible = visible & (keys_row < (places + window)[:, None])
    else:
        visible = keys_row <= places[:, None]
        if shape.has_window:
            visible = visible & (keys_row > (places - window)[:, None])
    return visible


visible_keys = triton.jit(_visible)


def _load_keys(
    pages: tl.tensor, cells: tl.tensor, dim: tl.constexpr, tile_dim: tl.constexpr
) -> tl.tensor:
    """(block_keys, tile_dim) of pages, from the element of each key on."""
    dims = tl.arange(0, tile_dim)
    at = pages + cells[:, None] + dims[None, :]
    if tile_dim == dim:
        block = tl.load(at)
    else:
        block = tl.load(at, mask=(dims < dim)[None, :], other=0)
    return block


load_keys = triton.jit(_load_keys)


def _pages_at(
    row_pages: tl.tensor, at: tl.tensor, last: tl.tensor, shape: tl.constexpr
) -> tl.tensor:
    """The pages of the block of keys that begins at `at`; one page where blocks lie in one."""
    if shape.has_whole_blocks:
        pages = tl.load(row_pages + tl.minimum(at, last) // shape.page_size)
    else:
        keys = tl.arange(0, shape.block_keys)
        pages = tl.load(row_pages + tl.minimum(at + keys, last) // shape.page_size)
    return pages


pages_at = triton.jit(_pages_at)


def _scores_of(
    queries: tl.tensor,
    rope_queries: tl.tensor,
    k: tl.tensor,
    k_pages: tl.tensor,
    tokens: tl.tensor,
    to_log2: tl.tensor,
    cap_log2: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Scores in base 2, capped where the layer has a cap."""
    scores = tl.dot(queries, tl.trans(k))
    if shape.rope_dim > 0:
        rope_cells = tokens * shape.token_stride + shape.head_dim
        k_rope = load_keys(k_pages, rope_cells, shape.rope_dim, shape.tile_rope_dim)
        scores = tl.dot(rope_queries, tl.trans(k_rope), scores)
    scores = scores * to_log2
    if shape.has_cap:
        scores = cap_log2 * (2.0 * tl.sigmoid(2.0 * scores / cap_log2) - 1.0)
    return scores


scores_of = triton.jit(_scores_of)


def _load_values(
    k: tl.tensor,
    v_pages: tl.tensor,
    tokens: tl.tensor,
    kv_head: tl.tensor,
    dtype: tl.constexpr,
    shape: tl.constexpr,
) -> tl.tensor:
    """(block_keys, tile_v_dim): V, which is k where that is latents."""
    v = k
    if shape.rope_dim == 0:
        cells = tokens * shape.v_token_stride + kv_head * shape.v_head_dim
        v = load_keys(v_pages, cells, shape.v_head_dim, shape.tile_v_dim)
        if shape.is_e4m3:
            v = from_e4m3(v, dtype)
    return v


load_values = triton.jit(_load_values)


def _sweep(  # noqa: PLR0913
    state: tl.tensor,
    tile: tl.tensor,
    row: tl.tensor,
    memory: tl.tensor,
    rule: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    is_masked: tl.constexpr,
    shape: tl.constexpr,
) -> tl.tensor:
    """state, maxima, sums and values, with keys start .. stop - 1, start being a block's first.
    Without is_masked, every pair sees them all and they are whole blocks.

    A block that reaches past the row holds its last key again: its weights are zero, and what is
    stale in a page's tail, which may be NaN, is never loaded.
    """
    maxima, sums, values = state
    queries, rope_queries = tile[0], tile[1]
    row_pages, last = row[0], tl.maximum(row[4] - 1, 0)
    k_pages, v_pages, kv_head = memory
    keys = tl.arange(0, shape.block_keys)
    dtype: tl.constexpr = queries.dtype
    # A block's pages are read one block ahead: addresses that a load in the same turn gave would
    # keep the compiler from having several blocks on their way at once.
    next_pages = pages_at(row_pages, start, last, shape)
    for block in range(start, stop, shape.block_keys):
        pages = next_pages.to(tl.int64)
        next_pages = pages_at(row_pages, block + shape.block_keys, last, shape)
        tokens = pages * shape.page_size + tl.minimum(block + keys, last) % shape.page_size
        k_cells = tokens * shape.token_stride + kv_head * shape.head_dim
        k = load_keys(k_pages, k_cells, shape.head_dim, shape.tile_dim)
        if shape.is_e4m3:
            k = from_e4m3(k, dtype)
        scores = scores_of(queries, rope_queries, k, k_pages, tokens, rule[1], rule[2], shape)
        if is_masked:
            seen = visible_keys(block + keys, tile, row, rule[0], shape)
            scores = tl.where(seen, scores, -float("inf"))
        new_maxima = tl.maximum(maxima, tl.max(scores, 1))
        base = new_maxima
        if is_masked:
            # A pair that has seen no key yet has no maximum.
            base = tl.where(new_maxima == -float("inf"), 0.0, new_maxima)
        rescale = tl.exp2(maxima - base)
        weights = tl.exp2(scores - base[:, None])
        sums = sums * rescale + tl.sum(weights, 1)
        v = load_values(k, v_pages, tokens, kv_head, dtype, shape)
        values = tl.dot(weights.to(dtype), v, values * rescale[:, None])
        maxima = new_maxima
    return maxima, sums, values


sweep = triton.jit(_sweep)
