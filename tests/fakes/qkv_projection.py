"""What becomes of a QKV projection, in float64: the description that fused kernels are held to."""

from __future__ import annotations

import torch

from attention.qkv_projection import HeadNorm, QKVProjection, Rotation


def finish(
    projection: QKVProjection, positions: torch.Tensor, num_q_heads: int, num_kv_heads: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exact q (n, num_q_heads, head_dim), k and v (n, num_kv_heads, head_dim), float64."""
    rotation = projection.rotation
    total = projection.partials.double().sum(0)
    if rotation.bias is not None:
        total = total + rotation.bias.double()
    heads = total.unflatten(-1, (num_q_heads + 2 * num_kv_heads, -1))
    q, k, v = heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)
    if rotation.head_norm is not None:
        norm = rotation.head_norm
        q, k = _normed(q, norm.q_weight, norm.eps), _normed(k, norm.k_weight, norm.eps)
    cos, sin = rotation.cos_sin.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    return _rotated(q, cos, sin), _rotated(k, cos, sin), v


def draw_projection(
    shape: tuple[int, int, int],
    head_dim: int,
    num_positions: int,
    *,
    dtype: torch.dtype,
    partial_dtype: torch.dtype,
    has_extras: bool,
    device: torch.device,
    seed: int = 0,
) -> QKVProjection:
    """Random partials of shape (splits, n, width), with bias and head norm if has_extras."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator).to(device)

    angles = torch.rand((num_positions, head_dim // 2), generator=generator).to(device) * 7.0
    cos_sin = torch.cat([angles.cos(), angles.sin()], dim=1).contiguous()
    partials = (randn(*shape) * shape[0] ** -0.5).to(partial_dtype)
    if not has_extras:
        return QKVProjection(partials, Rotation(cos_sin, None, None), dtype)
    norm = HeadNorm(randn(head_dim).to(dtype), randn(head_dim).to(dtype), 1e-6)
    return QKVProjection(partials, Rotation(cos_sin, randn(shape[2]).to(dtype), norm), dtype)


def _normed(heads: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return heads * torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps) * weight.double()


def _rotated(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
