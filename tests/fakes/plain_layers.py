"""What references of drafters compute alike, in plain torch."""

import torch


def rotated(x: torch.Tensor, positions: torch.Tensor, theta: float) -> torch.Tensor:
    """x: (n, heads, size), by halves; positions: (n,)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half) / half)
    angles = (positions[:, None] * frequencies).unsqueeze(1)
    first, second = x[..., :half], x[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def rms_normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
