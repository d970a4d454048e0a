"""Root-mean-square normalisation, alone or fused with the residual addition before it."""

from collections.abc import Mapping

import torch
from torch import nn

from workers.layers.sharding import ShardContext, ShardedLayer, TensorSource, copy_slice


def unit_rms(x: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) over the last dimension, the mean in float32, rounded to x's dtype."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


class RMSNorm(ShardedLayer):
    """x / rms(x) * weight over the last dimension (Zhang and Sennrich, 2019).

    The mean is taken in float32 and the quotient rounded to x's dtype before the weight, as the
    checkpoints of the Llama family were trained. Replicated on every rank.
    """

    def __init__(self, hidden_size: int, eps: float, shard: ShardContext) -> None:
        super().__init__()
        self.eps = eps
        self.weight = shard.empty_parameter(hidden_size)

    @property
    def scale(self) -> torch.Tensor:
        """What kernels multiply by: of the weight's dtype what was rounded to it, float32 what was
        not. (hidden_size,), of the weight as it is now."""
        return self.weight

    def checkpoint_shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {"weight": tuple(self.weight.shape)}

    def load_shard(self, name_part: str, tensor: TensorSource) -> None:
        copy_slice(self.weight, tensor, slice(0, self.weight.shape[0]))

    def shard_as_it_lies(self, name_part: str) -> tuple[nn.Parameter, tuple[slice, ...]]:
        return self.weight, (slice(0, self.weight.shape[0]),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x (..., hidden_size) -> the same shape and dtype."""
        return self.weight * unit_rms(x, self.eps)

    def add_and_norm_(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual += x, in place; returns the norm of the sum."""
        normed: torch.Tensor = self(residual.add_(x))
        return normed


class UnitOffsetRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), in float32 up to the result (Gemma)."""

    @property
    def scale(self) -> torch.Tensor:
        return 1.0 + self.weight.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (normed * self.scale).to(x.dtype)
