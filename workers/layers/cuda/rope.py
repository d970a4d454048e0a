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

from attention.kernels.triton_projection import normalised, rotated, summed_parts
from attention.qkv_projection import Rotation
from workers.layers.cuda.launch import (
    begin_dependent,
    dependent_launch,
)
from workers.layers.new_tensor import NewTensor

_MAX_HEADS_PER_PROGRAM = 8
_NUM_WARPS = 2


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


def _rope_kv(  # noqa: PLR0913
    partials: tl.tensor,
    bias: tl.tensor,
    q_norm: tl.tensor,
    k_norm: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    target_indices: tl.tensor,
    q_out: tl.tensor,
    k_target: tl.tensor,
    v_target: tl.tensor,
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
    """A program: HEADS heads of a token, q, then k, then v."""
    dtype: tl.constexpr = q_out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS
    begin_dependent(IS_DEPENDENT)
    lane = tl.arange(0, HALF)[None, :]
    within = tl.arange(0, HEADS)[:, None] * (2 * HALF) + lane
    row = partials + token * ((NUM_Q + 2 * NUM_KV) * 2 * HALF)
    at = head * (2 * HALF) + within
    first = summed_parts(row, bias, at, None, split_stride, NUM_SPLITS, HAS_BIAS, dtype)
    second = summed_parts(row, bias, at + HALF, None, split_stride, NUM_SPLITS, HAS_BIAS, dtype)
    target = tl.load(target_indices + token) * NUM_KV
    out = v_target + (target + head - NUM_Q - NUM_KV) * (2 * HALF)
    norm = q_norm
    if head < NUM_Q:
        out = q_out + (token * NUM_Q + head) * (2 * HALF)
    elif head < NUM_Q + NUM_KV:
        out = k_target + (target + head - NUM_Q) * (2 * HALF)
        norm = k_norm
    if head < NUM_Q + NUM_KV:
        if HAS_NORM:
            first, second = normalised(first, second, norm + lane, eps, HALF, dtype)
        cos = tl.load(cos_sin + tl.load(positions + token) * (2 * HALF) + lane)
        sin = tl.load(cos_sin + tl.load(positions + token) * (2 * HALF) + HALF + lane)
        first, second = rotated(first, second, cos, sin)
    tl.store(out + within, first.to(dtype))
    tl.store(out + within + HALF, second.to(dtype))


_rope_kv_kernel = triton.jit(_rope_kv)


@dataclass(frozen=True, slots=True)
class FusedRope:
    """The kernel with what one layer never changes."""

    shape: RopeShape
    rotation: Rotation

    def __call__(
        self,
        partials: torch.Tensor,
        positions: torch.Tensor,
        target_indices: torch.Tensor,
        k_target: torch.Tensor,
        v_target: torch.Tensor,
        dtype: torch.dtype,
        new: NewTensor = torch.empty,
    ) -> torch.Tensor:
        """Queries (n, num_q_heads, head_dim) of dtype, in a tensor that new makes; keys and values
        go to the targets.

        partials: (splits, n, (num_q_heads + 2 * num_kv_heads) * head_dim), contiguous.
        positions, target_indices: int64 (n,). k_target, v_target: contiguous, any shape whose
        flat rows of num_kv_heads * head_dim are what target_indices count.
        """
        shape = self.shape
        num_splits, num_tokens, width = partials.shape
        q_shape = num_tokens, shape.num_q_heads, shape.head_dim
        q_out = new(q_shape, dtype=dtype, device=partials.device)
        heads = shape.heads_per_program
        bias, norm = self.rotation.bias, self.rotation.head_norm
        is_dependent = dependent_launch(partials)
        _rope_kv_kernel[(num_tokens, (shape.num_q_heads + 2 * shape.num_kv_heads) // heads)](
            partials,
            partials if bias is None else bias,
            partials if norm is None else norm.q_weight,
            partials if norm is None else norm.k_weight,
            self.rotation.cos_sin,
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
            HAS_BIAS=bias is not None,
            HAS_NORM=norm is not None,
            IS_DEPENDENT=is_dependent,
            num_warps=_NUM_WARPS,
            launch_pdl=is_dependent,
        )
        return q_out

    def into_new(
        self,
        partials: torch.Tensor,
        positions: torch.Tensor,
        dtype: torch.dtype,
        new: NewTensor = torch.empty,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As __call__ -> queries, keys and values (n, heads, head_dim), in tensors of new."""
        num_tokens, device = partials.shape[1], partials.device
        kv_shape = num_tokens, self.shape.num_kv_heads, self.shape.head_dim
        k, v = (new(kv_shape, dtype=dtype, device=device) for _ in range(2))
        rows = torch.arange(num_tokens, device=device)
        return self(partials, positions, rows, k, v, dtype, new), k, v
