"""From projections to what latent attention takes, in one kernel: sums of K splits, the latent's
norm, the rotations, and the new latents at their places in the pool. Knows no page table.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from attention.kernels.triton_projection import rotated, summed_parts
from workers.layers.cuda.launch import begin_dependent, dependent_launch, next_power_of_2
from workers.layers.new_tensor import NewTensor

_NUM_WARPS = 2


def _run_kept_latent(  # noqa: PLR0913
    row: tl.tensor,
    norm: tl.tensor,
    kept: tl.tensor,
    out: tl.tensor,
    split_stride: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
) -> None:
    """A token's latent, normalised, to both places."""
    dtype: tl.constexpr = out.dtype.element_ty
    lane = tl.arange(0, BLOCK)
    is_real = lane < SIZE
    latent = summed_parts(row, row, lane, is_real, split_stride, SPLITS, False, dtype)
    inverse_rms = tl.rsqrt(tl.sum(latent * latent, axis=0) / SIZE + eps)
    scale = tl.load(norm + lane, mask=is_real, other=0.0).to(tl.float32)
    normed = ((latent * inverse_rms).to(dtype).to(tl.float32) * scale).to(dtype)
    tl.store(kept + lane, normed, mask=is_real)
    tl.store(out + lane, normed, mask=is_real)


_kept_latent = triton.jit(_run_kept_latent)


def _run_rotate_to(
    row: tl.tensor,
    out: tl.tensor,
    angle: tl.tensor,
    split_stride: tl.tensor,
    HALF: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
    IS_INTERLEAVED: tl.constexpr,  # noqa: N803
) -> None:
    """Rotated, first elements of all pairs before the second ones. angle: of the cosines."""
    dtype: tl.constexpr = out.dtype.element_ty
    pair = tl.arange(0, HALF)
    at_first = 2 * pair if IS_INTERLEAVED else pair
    at_second = 2 * pair + 1 if IS_INTERLEAVED else HALF + pair
    first = summed_parts(row, row, at_first, None, split_stride, SPLITS, False, dtype)
    second = summed_parts(row, row, at_second, None, split_stride, SPLITS, False, dtype)
    cos, sin = tl.load(angle + pair), tl.load(angle + HALF + pair)
    first, second = rotated(first, second, cos, sin)
    tl.store(out + pair, first.to(dtype))
    tl.store(out + HALF + pair, second.to(dtype))


_rotate_to = triton.jit(_run_rotate_to)


def _project_latents(  # noqa: PLR0913
    queries: tl.tensor,
    keys: tl.tensor,
    norm: tl.tensor,
    cos_sin: tl.tensor,
    positions: tl.tensor,
    cache_loc: tl.tensor,
    q_out: tl.tensor,
    latent_out: tl.tensor,
    pool: tl.tensor,
    query_split: tl.tensor,
    query_row: tl.tensor,
    key_split: tl.tensor,
    key_row: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,  # noqa: N803
    NOPE: tl.constexpr,  # noqa: N803
    NOPE_BLOCK: tl.constexpr,  # noqa: N803
    LATENT: tl.constexpr,  # noqa: N803
    LATENT_BLOCK: tl.constexpr,  # noqa: N803
    HALF: tl.constexpr,  # noqa: N803
    QUERY_SPLITS: tl.constexpr,  # noqa: N803
    KEY_SPLITS: tl.constexpr,  # noqa: N803
    IS_INTERLEAVED: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """A program: a token's latent and rotated key part, or one of its heads' queries."""
    dtype: tl.constexpr = q_out.dtype.element_ty
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) - 1
    begin_dependent(IS_DEPENDENT)
    angle = cos_sin + tl.load(positions + token) * (2 * HALF)
    if head < 0:
        row = keys + token * key_row
        kept = pool + tl.load(cache_loc + token) * (LATENT + 2 * HALF)
        out = latent_out + token * (LATENT + 2 * HALF)
        _kept_latent(row, norm, kept, out, key_split, eps, LATENT, LATENT_BLOCK, KEY_SPLITS)
        row += LATENT
        _rotate_to(row, kept + LATENT, angle, key_split, HALF, KEY_SPLITS, IS_INTERLEAVED)
        _rotate_to(row, out + LATENT, angle, key_split, HALF, KEY_SPLITS, IS_INTERLEAVED)
    else:
        row = queries + token * query_row + head * (NOPE + 2 * HALF)
        out = q_out + (token * HEADS + head) * (NOPE + 2 * HALF)
        lane = tl.arange(0, NOPE_BLOCK)
        plain = summed_parts(row, row, lane, lane < NOPE, query_split, QUERY_SPLITS, False, dtype)
        tl.store(out + lane, plain.to(dtype), mask=lane < NOPE)
        row += NOPE
        _rotate_to(row, out + NOPE, angle, query_split, HALF, QUERY_SPLITS, IS_INTERLEAVED)


_project_latents_kernel = triton.jit(_project_latents)


@dataclass(frozen=True, slots=True)
class LatentProjection:
    """The kernel with what one layer never changes.

    norm_weight: (latent_dim,). cos_sin: float32 (positions, rope_dim), cosines before sines.
    pool: the layer's latents, (tokens, latent_dim + rope_dim), of the queries' dtype.
    """

    num_heads: int
    nope_dim: int
    norm_weight: torch.Tensor
    eps: float
    cos_sin: torch.Tensor
    is_interleaved: bool
    pool: torch.Tensor

    def __call__(
        self,
        queries: torch.Tensor,
        keys: torch.Tensor,
        positions: torch.Tensor,
        cache_loc: torch.Tensor,
        new: NewTensor = torch.empty,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries (n, num_heads, qk_head_dim), rotated parts last, and what the pool keeps
        (n, latent_dim + rope_dim), in tensors that new makes.

        queries: partial products (splits, n, num_heads * qk_head_dim), keys: (splits, n,
        latent_dim + rope_dim); both with contiguous rows. positions, cache_loc: int64 (n,).
        """
        num_tokens, latent_dim = keys.shape[1], self.norm_weight.shape[0]
        rope_dim = self.cos_sin.shape[1]
        q_shape = (num_tokens, self.num_heads, self.nope_dim + rope_dim)
        q = new(q_shape, dtype=self.pool.dtype, device=keys.device)
        kept = new((num_tokens, latent_dim + rope_dim), dtype=q.dtype, device=q.device)
        is_dependent = dependent_launch(keys)
        _project_latents_kernel[(num_tokens, 1 + self.num_heads)](
            queries,
            keys,
            self.norm_weight,
            self.cos_sin,
            positions,
            cache_loc,
            q,
            kept,
            self.pool,
            queries.stride(0),
            queries.stride(1),
            keys.stride(0),
            keys.stride(1),
            self.eps,
            HEADS=self.num_heads,
            NOPE=self.nope_dim,
            NOPE_BLOCK=next_power_of_2(self.nope_dim),
            LATENT=latent_dim,
            LATENT_BLOCK=next_power_of_2(latent_dim),
            HALF=rope_dim // 2,
            QUERY_SPLITS=queries.shape[0],
            KEY_SPLITS=keys.shape[0],
            IS_INTERLEAVED=self.is_interleaved,
            IS_DEPENDENT=is_dependent,
            num_warps=_NUM_WARPS,
            launch_pdl=is_dependent,
        )
        return q, kept
