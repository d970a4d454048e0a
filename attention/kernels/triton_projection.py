"""Triton: from a QKV projection's parts to its heads: the roundings that every kernel shares.

A key shall not depend on which kernel finished it, so sum, norm and rotation stand here once.
The rotation's multiply-adds are written out: a compiler that chose by itself which of two products
to fuse might choose differently in two kernels. Imports Triton.

Everywhere: first and second are a head's halves, float32 values that dtype can represent.
"""

from __future__ import annotations

import triton
import triton.language as tl


def _summed_parts(
    row: tl.tensor,
    bias: tl.tensor,
    at: tl.tensor,
    mask: tl.tensor,
    split_stride: tl.tensor,
    num_splits: tl.constexpr,
    has_bias: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """The projection at some columns, rounded to dtype; zeros where a mask (or None) says no."""
    other: tl.constexpr = None if mask is None else 0.0
    total = tl.load(row + at, mask=mask, other=other).to(tl.float32)
    for split in tl.static_range(1, num_splits):
        total += tl.load(row + split * split_stride + at, mask=mask, other=other).to(tl.float32)
    if has_bias:
        total += tl.load(bias + at, mask=mask, other=other).to(tl.float32)
    return total.to(dtype).to(tl.float32)


summed_parts = triton.jit(_summed_parts)


def _scaled(x: tl.tensor, weight: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """x times what weight points at: a weight of dtype scales what was rounded to it, as Qwen's
    norms do, a wider one what was not, as Gemma's."""
    if weight.dtype.element_ty == dtype:
        x = x.to(dtype).to(tl.float32)
    return x * tl.load(weight).to(tl.float32)


scaled = triton.jit(_scaled)


def _normalised(
    first: tl.tensor,
    second: tl.tensor,
    weight: tl.tensor,
    eps: tl.tensor,
    half: tl.constexpr,
    dtype: tl.constexpr,
) -> tl.tensor:
    """RMSNorm of every head; weight points at the first half's columns.

    A sum's order follows from how a kernel spreads a head over its threads, so that two kernels'
    means may differ in their last bit, and one in some ten thousand of the rounded results then
    does. Deterministic mode has one kernel for all steps. In float64 no bit would differ: it took
    1.8 us of every layer of Qwen3-0.6B on an H200."""
    mean = tl.sum(first * first + second * second, axis=1) / (2 * half)
    inverse_rms = tl.rsqrt(mean + eps)[:, None]
    first = scaled(first * inverse_rms, weight, dtype)
    second = scaled(second * inverse_rms, weight + half, dtype)
    return first.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)


normalised = triton.jit(_normalised)


def _rotated(first: tl.tensor, second: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    """Both halves, rotated by angles whose cosines and sines broadcast to them."""
    return tl.fma(first, cos, -(second * sin)), tl.fma(second, cos, first * sin)


rotated = triton.jit(_rotated)
