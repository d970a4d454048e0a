"""Triton: a decode kernel's front: from a token's QKV projection to its queries, key and value.

Finishes heads by triton_projection.py, as the engine's rotation kernel does. Also asks for K and V
that the chunk is about to read. Knows no plan. Imports Triton.

Everywhere: shape is a DecodeShape and front a FrontShape, known when the kernel is compiled; first
and second are a head's halves, float32 values that dtype can represent.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from attention.kernels.triton_decode_parts import capped
from attention.kernels.triton_projection import normalised, rotated, summed_parts

LINE_BYTES = tl.constexpr(128)
_ELEMENT_BYTES = tl.constexpr(2)


def _prefetch_lines(addresses: tl.tensor) -> None:
    """Ask for the 128-byte lines at int64 addresses to come to L2; waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


prefetch_lines = triton.jit(_prefetch_lines)


def _prefetch_keys(
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    row_pages: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    front: tl.constexpr,
    shape: tl.constexpr,
) -> None:
    """Ask for K and V of up to front.prefetch_keys keys from start on, before stop; of the row's
    first key where there are none."""
    num_keys: tl.constexpr = front.prefetch_keys
    if num_keys > 0:
        num_lines: tl.constexpr = shape.head_dim * _ELEMENT_BYTES // LINE_BYTES
        positions = tl.maximum(tl.minimum(start + tl.arange(0, num_keys), stop - 1), 0)
        pages = tl.load(row_pages + positions // shape.page_size).to(tl.int64)
        tokens = pages * shape.page_size + positions % shape.page_size
        elements = (tokens * shape.kv_heads + kv_head) * shape.head_dim
        lines = tl.arange(0, num_lines) * (LINE_BYTES // _ELEMENT_BYTES)
        cells = elements[:, None] + lines[None, :]
        prefetch_lines((k_pages + cells).to(tl.int64))
        prefetch_lines((v_pages + cells).to(tl.int64))


prefetch_keys = triton.jit(_prefetch_keys)


def _load_block(
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    row_pages: tl.tensor,
    kv_head: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """K and V of the keys from start on, a block of them: the last key again past stop, and zeros
    where there is no key at all."""
    keys = tl.arange(0, shape.block_keys)
    dims = tl.arange(0, shape.tile_dim)
    positions = tl.maximum(tl.minimum(start + keys, stop - 1), 0)
    pages = tl.load(row_pages + positions // shape.page_size).to(tl.int64)
    tokens = pages * shape.page_size + positions % shape.page_size
    cells = ((tokens * shape.kv_heads + kv_head) * shape.head_dim)[:, None] + dims[None, :]
    k = tl.load(k_pages + cells, mask=start < stop, other=0.0)
    v = tl.load(v_pages + cells, mask=start < stop, other=0.0)
    return k, v


load_block = triton.jit(_load_block)


def _rotated_heads(  # noqa: PLR0913
    token: tl.tensor,
    bias: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    split_stride: tl.tensor,
    norm: tl.tensor,
    eps: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    half: tl.constexpr,
    front: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """Heads whose first halves are at columns `at` (heads, half), normalised and rotated: both
    halves in dtype. norm: the norm's weight at the first half's columns."""
    splits: tl.constexpr = front.num_splits
    has_bias: tl.constexpr = front.has_bias
    first = summed_parts(token, bias, at, mask, split_stride, splits, has_bias, dtype)
    second = summed_parts(token, bias, at + half, mask, split_stride, splits, has_bias, dtype)
    if front.has_norm:
        first, second = normalised(first, second, norm, eps, half, dtype)
    first, second = rotated(first, second, cos, sin)
    return first.to(dtype), second.to(dtype)


rotated_heads = triton.jit(_rotated_heads)


def _start_sums(  # noqa: PLR0913
    q_first: tl.tensor,
    q_second: tl.tensor,
    k_first: tl.tensor,
    k_second: tl.tensor,
    v_new: tl.tensor,
    has_own: tl.tensor,
    to_log2: tl.tensor,
    cap_log2: tl.tensor,
    shape: tl.constexpr,
) -> tl.tensor:
    """Maxima, sums and values to start from: of the new key if has_own, else of none."""
    tile_rows: tl.constexpr = shape.tile_rows
    tile_dim: tl.constexpr = shape.tile_dim
    block_keys: tl.constexpr = shape.block_keys
    products = q_first.to(tl.float32) * k_first.to(tl.float32)
    products += q_second.to(tl.float32) * k_second.to(tl.float32)
    scores = capped(tl.sum(products, 1) * to_log2, cap_log2, shape)
    maxima = tl.where(has_own, scores, -float("inf"))
    is_own_lane = has_own & (tl.arange(0, block_keys) == 0)
    sums = tl.zeros((tile_rows, block_keys), tl.float32) + tl.where(is_own_lane, 1.0, 0.0)[None, :]
    values = tl.zeros((tile_rows, tile_dim), tl.float32) + tl.where(has_own, v_new, 0.0)[None, :]
    return maxima, sums, values


start_sums = triton.jit(_start_sums)


def _finish_token(  # noqa: PLR0913
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
    row: tl.tensor,
    kv_head: tl.tensor,
    seq_len: tl.tensor,
    is_last: tl.tensor,
    to_log2: tl.tensor,
    cap_log2: tl.tensor,
    front: tl.constexpr,
    shape: tl.constexpr,
) -> tl.tensor:
    """Wait for the projection; the group's queries, and the maxima, sums and values to start from.

    row: int64. is_last: this program has the row's last chunk: it stores the new key and value and
    starts from them.
    """
    tile_rows: tl.constexpr = shape.tile_rows
    head_dim: tl.constexpr = shape.head_dim
    half: tl.constexpr = head_dim // 2
    dtype: tl.constexpr = k_pages.dtype.element_ty
    token = projected + row * ((shape.group + 2) * shape.kv_heads * head_dim)
    lane, dims = tl.arange(0, half)[None, :], tl.arange(0, head_dim)
    heads = tl.arange(0, tile_rows)
    angles = cos_sin + tl.maximum(seq_len - 1, 0).to(tl.int64) * head_dim + lane
    cos, sin = tl.load(angles), tl.load(angles + half)
    q_at = (kv_head * shape.group + heads)[:, None] * head_dim + lane
    k_at = (shape.group * shape.kv_heads + kv_head) * head_dim + lane
    v_at = ((shape.group + 1) * shape.kv_heads + kv_head) * head_dim + dims
    gdc_wait()
    q_first, q_second = rotated_heads(
        token, bias, q_at, (heads < shape.group)[:, None], split_stride, q_norm + lane, eps,
        cos, sin, half, front, dtype,
    )  # fmt: skip
    k_first, k_second = rotated_heads(
        token, bias, k_at, is_last, split_stride, k_norm + lane, eps, cos, sin, half, front, dtype
    )
    v_new = summed_parts(
        token, bias, v_at, is_last, split_stride, front.num_splits, front.has_bias, dtype
    )
    place = (tl.load(out_cache_loc + row).to(tl.int64) * shape.kv_heads + kv_head) * head_dim
    tl.store(k_pages + place + lane, k_first, mask=is_last)
    tl.store(k_pages + place + half + lane, k_second, mask=is_last)
    tl.store(v_pages + place + dims, v_new.to(dtype), mask=is_last)
    # Rows that pad a graph's batch have no key, not even their own.
    maxima, sums, values = start_sums(
        q_first, q_second, k_first, k_second, v_new, is_last & (seq_len > 0), to_log2, cap_log2,
        shape,
    )  # fmt: skip
    halves = tl.permute(tl.join(q_first, q_second), (0, 2, 1))
    return tl.reshape(halves, (tile_rows, head_dim)), maxima, sums, values


finish_token = triton.jit(_finish_token)
