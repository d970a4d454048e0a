"""From a QKV projection to rotated queries and to keys and values in the pool, in one kernel.

It sums the projection's K splits, adds the bias, normalises heads where the model does, rotates
queries and keys and writes keys and values to their pages. Knows no page table: a token's cache
index is all it needs, whatever the page size.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch

_MAX_HEADS_PER_PROGRAM = 8
_WIDE_BATCH = 64


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMSNorm over every query and key head (Qwen3). Weights: (head_dim,)."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class RopeShape:
    """Heads of this rank; the rotation covers a whole head."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def split_sizes(self) -> list[int]:
        """Columns of q, k and v in a projection's row."""
        kv_size = self.num_kv_heads * self.head_dim
        return [self.num_q_heads * self.head_dim, kv_size, kv_size]

    @property
    def heads_per_program(self) -> int:
        """Divides both counts, so that a program's heads are all queries, all keys or all values.

        A power of two, as Triton's blocks are.
        """
        common = math.gcd(self.num_q_heads, self.num_kv_heads)
        return min(_MAX_HEADS_PER_PROGRAM, common & -common)


def _run_load_half(
    partials: tl.tensor,
    bias: tl.tensor,
    row_offset: tl.tensor,
    columns: tl.tensor,
    split_stride: tl.tensor,
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803
) -> tl.tensor:
    """float32 values as the projection gives them in the model's dtype."""
    total = tl.load(partials + row_offset + columns).to(tl.float32)
    for split in tl.static_range(1, NUM_SPLITS):
        total += tl.load(partials + split * split_stride + row_offset + columns).to(tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + columns).to(tl.float32)
    return total.to(DTYPE).to(tl.float32)


_load_half = triton.jit(_run_load_half)


def _rope_kv(  # noqa: PLR0913
    partials: tl.tensor,
    bias: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    out_cache_loc: tl.tensor,
    q_out: tl.tensor,
    k_pool: tl.tensor,
    v_pool: tl.tensor,
    split_stride: tl.tensor,
    eps: tl.tensor,
    NUM_Q: tl.constexpr,  # noqa: N803
    NUM_KV: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    HEADS: tl.constexpr,  # noqa: N803
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    HAS_BIAS: tl.constexpr,  # noqa: N803
    HAS_NORM: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """One token and HEADS heads a program; heads count q first, then k, then v."""
    dtype: tl.constexpr = q_out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    first_head = tl.program_id(1) * HEADS
    begin_dependent(IS_DEPENDENT)
    heads = tl.arange(0, HEADS)[:, None]
    lane = tl.arange(0, HALF)[None, :]
    columns = (first_head + heads) * (2 * HALF) + lane
    row_offset = token * ((NUM_Q + 2 * NUM_KV) * 2 * HALF)
    first = _load_half(
        partials, bias, row_offset, columns, split_stride, NUM_SPLITS, HAS_BIAS, dtype
    )
    second = _load_half(
        partials, bias, row_offset, columns + HALF, split_stride, NUM_SPLITS, HAS_BIAS, dtype
    )
    within = heads * (2 * HALF) + lane
    if first_head >= NUM_Q + NUM_KV:
        cache_index = tl.load(out_cache_loc + token)
        target = v_pool + (cache_index * NUM_KV + first_head - NUM_Q - NUM_KV) * (2 * HALF) + within
        tl.store(target, first.to(v_pool.dtype.element_ty))
        tl.store(target + HALF, second.to(v_pool.dtype.element_ty))
    else:
        if HAS_NORM:
            norm = q_norm if first_head < NUM_Q else k_norm
            mean = (tl.sum(first * first, axis=1) + tl.sum(second * second, axis=1)) / (2 * HALF)
            inverse_rms = tl.rsqrt(mean + eps)[:, None]
            first = (first * inverse_rms).to(dtype).to(tl.float32)
            second = (second * inverse_rms).to(dtype).to(tl.float32)
            first = (first * tl.load(norm + lane).to(tl.float32)).to(dtype).to(tl.float32)
            second = (second * tl.load(norm + lane + HALF).to(tl.float32)).to(dtype).to(tl.float32)
        angles = cos_sin + tl.load(positions + token) * (2 * HALF) + lane
        cos = tl.load(angles)
        sin = tl.load(angles + HALF)
        rotated_first = first * cos - second * sin
        rotated_second = second * cos + first * sin
        if first_head < NUM_Q:
            target = q_out + (token * NUM_Q + first_head) * (2 * HALF) + within
            tl.store(target, rotated_first.to(dtype))
            tl.store(target + HALF, rotated_second.to(dtype))
        else:
            cache_index = tl.load(out_cache_loc + token)
            target = k_pool + (cache_index * NUM_KV + first_head - NUM_Q) * (2 * HALF) + within
            tl.store(target, rotated_first.to(k_pool.dtype.element_ty))
            tl.store(target + HALF, rotated_second.to(k_pool.dtype.element_ty))


_rope_kv_kernel = triton.jit(_rope_kv)


@dataclass(frozen=True, slots=True)
class FusedRope:
    """The kernel with what one layer never changes.

    bias: (all heads * head_dim,) or None. cos_sin: float32 (positions, head_dim), cosines first.
    """

    shape: RopeShape
    cos_sin: torch.Tensor
    bias: torch.Tensor | None
    head_norm: HeadNorm | None

    def __call__(
        self,
        partials: torch.Tensor,
        positions: torch.Tensor,
        target_indices: torch.Tensor,
        k_target: torch.Tensor,
        v_target: torch.Tensor,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Queries (n, num_q_heads, head_dim) of dtype; keys and values go to the targets.

        partials: (splits, n, (num_q_heads + 2 * num_kv_heads) * head_dim), contiguous.
        positions, target_indices: int64 (n,). k_target, v_target: contiguous, any shape whose
        flat rows of num_kv_heads * head_dim are what target_indices count.
        """
        shape = self.shape
        num_splits, num_tokens, width = partials.shape
        q_out = torch.empty(
            (num_tokens, shape.num_q_heads, shape.head_dim), dtype=dtype, device=partials.device
        )
        heads = shape.heads_per_program
        norm = self.head_norm
        is_dependent = dependent_launch(partials)
        _rope_kv_kernel[(num_tokens, (shape.num_q_heads + 2 * shape.num_kv_heads) // heads)](
            partials,
            partials if self.bias is None else self.bias,
            partials if norm is None else norm.q_weight,
            partials if norm is None else norm.k_weight,
            self.cos_sin,
            positions,
            target_indices,
            q_out,
            k_target,
            v_target,
            num_tokens * width,
            0.0 if norm is None else norm.eps,
            NUM_Q=shape.num_q_heads,
            NUM_KV=shape.num_kv_heads,
            HALF=shape.head_dim // 2,
            HEADS=heads,
            NUM_SPLITS=num_splits,
            HAS_BIAS=self.bias is not None,
            HAS_NORM=norm is not None,
            IS_DEPENDENT=is_dependent,
            num_warps=2 if num_tokens < _WIDE_BATCH else 4,
            launch_pdl=is_dependent,
        )
        return q_out
