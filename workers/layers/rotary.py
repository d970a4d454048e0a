"""Rotary position embedding by table. Knows positions, not sequences."""

import torch
from torch import nn

from workers.layers.rope_frequencies import RopeSpec, cos_sin_table


class RotaryEmbedding(nn.Module):
    """Rotates the first rotary_dim elements of every query and key head by its token's position.

    Element i pairs with element i + rotary_dim / 2, as in Hugging Face's checkpoints. The rotation
    is computed in float32. One instance serves all layers of a model.
    """

    def __init__(self, spec: RopeSpec, num_positions: int, device: torch.device) -> None:
        super().__init__()
        self.rotary_dim = spec.rotary_dim
        self.cos_sin = nn.Buffer(cos_sin_table(spec, num_positions).to(device), persistent=False)

    def forward(
        self, positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """positions int64 (n,), below num_positions; q, k (n, heads, head_dim) -> rotated alike."""
        cos, sin = self.cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        return self._rotate(q, cos, sin), self._rotate(k, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = self._pairs(x)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        rotated = rotated.to(x.dtype)
        if self.rotary_dim == x.shape[-1]:
            return rotated
        return torch.cat((rotated, x[..., self.rotary_dim :]), dim=-1)

    def _pairs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The two elements of every pair, each (n, heads, rotary_dim / 2)."""
        first, second = x[..., : self.rotary_dim].chunk(2, dim=-1)
        return first, second


class InterleavedRotaryEmbedding(RotaryEmbedding):
    """Neighbouring elements make a pair, as in DeepSeek's checkpoints.

    What is rotated comes out with the first elements of all pairs before the second ones: queries
    and keys alike, so that their products are the same.
    """

    def _pairs(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[..., 0 : self.rotary_dim : 2], x[..., 1 : self.rotary_dim : 2]
