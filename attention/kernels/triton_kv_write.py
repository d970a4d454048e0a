"""Triton: new tokens' K and V into the paged pool in one launch, as they are or as scaled e4m3.

Tensors in, pages written; knows no layer and no pool object. Imports Triton: load it by way of
attention.kernels.providers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

E4M3_MAX = tl.constexpr(448.0)


def _copy_tokens(  # noqa: PLR0913
    k: tl.tensor,
    v: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    cache_indices: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    v_head_dim: tl.constexpr,
    k_block: tl.constexpr,
    v_block: tl.constexpr,
) -> None:
    """Program: one token, all its heads."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(cache_indices + token)
    element = tl.arange(0, k_block)
    is_inside = element < num_heads * head_dim
    source = k + token * k_token_stride + (element // head_dim) * k_head_stride
    row = tl.load(source + element % head_dim, mask=is_inside)
    tl.store(k_pages + index * (num_heads * head_dim) + element, row, mask=is_inside)
    element = tl.arange(0, v_block)
    is_inside = element < num_heads * v_head_dim
    source = v + token * v_token_stride + (element // v_head_dim) * v_head_stride
    row = tl.load(source + element % v_head_dim, mask=is_inside)
    tl.store(v_pages + index * (num_heads * v_head_dim) + element, row, mask=is_inside)


def _quantise_tokens(  # noqa: PLR0913
    k: tl.tensor,
    v: tl.tensor,
    k_token_stride: tl.tensor,
    k_head_stride: tl.tensor,
    v_token_stride: tl.tensor,
    v_head_stride: tl.tensor,
    k_pages: tl.tensor,
    v_pages: tl.tensor,
    cache_indices: tl.tensor,
    scales: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    v_head_dim: tl.constexpr,
    k_block: tl.constexpr,
    v_block: tl.constexpr,
) -> None:
    """Program: one token, all its heads, divided by the scale and saturated to e4m3."""
    token = tl.program_id(0).to(tl.int64)
    index = tl.load(cache_indices + token)
    element = tl.arange(0, k_block)
    is_inside = element < num_heads * head_dim
    source = k + token * k_token_stride + (element // head_dim) * k_head_stride
    row = tl.load(source + element % head_dim, mask=is_inside).to(tl.float32)
    row = tl.div_rn(row, tl.load(scales))
    row = tl.clamp(row, -E4M3_MAX, E4M3_MAX).to(tl.float8e4nv)
    tl.store(k_pages + index * (num_heads * head_dim) + element, row, mask=is_inside)
    element = tl.arange(0, v_block)
    is_inside = element < num_heads * v_head_dim
    source = v + token * v_token_stride + (element // v_head_dim) * v_head_stride
    row = tl.load(source + element % v_head_dim, mask=is_inside).to(tl.float32)
    row = tl.div_rn(row, tl.load(scales + 1))
    row = tl.clamp(row, -E4M3_MAX, E4M3_MAX).to(tl.float8e4nv)
    tl.store(v_pages + index * (num_heads * v_head_dim) + element, row, mask=is_inside)


def _quantise_heads(
    q: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    out: tl.tensor,
    num_heads: tl.constexpr,
    head_dim: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """Program: one token, all its heads, saturated to e4m3."""
    token = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, block)
    is_inside = element < num_heads * head_dim
    source = q + token * token_stride + (element // head_dim) * head_stride
    row = tl.load(source + element % head_dim, mask=is_inside).to(tl.float32)
    row = tl.clamp(row, -E4M3_MAX, E4M3_MAX).to(tl.float8e4nv)
    tl.store(out + token * (num_heads * head_dim) + element, row, mask=is_inside)


_copy_kernel = triton.jit(_copy_tokens)
_query_kernel = triton.jit(_quantise_heads)
_quantise_kernel = triton.jit(_quantise_tokens)


def copy_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    cache_indices: torch.Tensor,
) -> None:
    """k (n, heads, head_dim), v (n, heads, v_head_dim), last dimension dense, to cache_indices
    int64 (n,) of contiguous pages (num_pages, page_size, heads, dim) of the same dtype."""
    if k.shape[0]:
        _copy_kernel[(k.shape[0],)](
            *_operands(k, v, k_pages, v_pages, cache_indices), **_geometry(k, v)
        )


def quantise_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    cache_indices: torch.Tensor,
    scales: torch.Tensor,
) -> None:
    """As copy_kv into float8_e4m3fn pages: x / scale, saturated at 448. scales: float32 (2,) on the
    device, K's and V's."""
    if k.shape[0]:
        _quantise_kernel[(k.shape[0],)](
            *_operands(k, v, k_pages, v_pages, cache_indices), scales, **_geometry(k, v)
        )


def quantise_queries(q: torch.Tensor) -> torch.Tensor:
    """q (n, heads, head_dim), last dimension dense -> dense float8_e4m3fn, scale 1, saturated."""
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    if num_tokens:
        _query_kernel[(num_tokens,)](
            q,
            q.stride(0),
            q.stride(1),
            out,
            num_heads=num_heads,
            head_dim=head_dim,
            block=triton.next_power_of_2(num_heads * head_dim),
        )
    return out


def _operands(
    k: torch.Tensor,
    v: torch.Tensor,
    k_pages: torch.Tensor,
    v_pages: torch.Tensor,
    cache_indices: torch.Tensor,
) -> tuple[torch.Tensor | int, ...]:
    strides = (k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    return (k, v, *strides, k_pages, v_pages, cache_indices)


def _geometry(k: torch.Tensor, v: torch.Tensor) -> dict[str, int]:
    num_heads, head_dim, v_head_dim = k.shape[1], k.shape[2], v.shape[2]
    return {
        "num_heads": num_heads,
        "head_dim": head_dim,
        "v_head_dim": v_head_dim,
        "k_block": triton.next_power_of_2(num_heads * head_dim),
        "v_block": triton.next_power_of_2(num_heads * v_head_dim),
    }
