"""A temperature of attention that falls with the query's position. Knows no layer."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PositionTemperature:
    """By what the queries of one layer are multiplied: at position p by
    log(floor((p + 1) / floor_scale) + 1) * attn_scale + 1 (arXiv:2501.19399)."""

    floor_scale: float
    attn_scale: float

    def scaled(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q (n, heads, head_dim), positions (n,) -> q's shape and dtype."""
        steps = torch.floor((positions.float() + 1.0) / self.floor_scale)
        scales = torch.log1p(steps) * self.attn_scale + 1.0
        return (q * scales.view(-1, 1, 1)).to(q.dtype)
