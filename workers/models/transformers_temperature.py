"""Llama 4's temperature by position, taken over from its layers without rotary embeddings.

Its code counts a query's position from the start of the call, which in a flat batch is another
row's. A query at position p is multiplied by log(floor((p + 1) / floor_scale) + 1) * attn_scale + 1
(arXiv:2501.19399), as the last thing that happens to it before attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class PositionTemperature:
    """By what the queries of one layer are multiplied."""

    floor_scale: float
    attn_scale: float

    def scaled(self, q: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """q (n, heads, head_dim), positions (n,) -> q's shape and dtype."""
        steps = torch.floor((positions.float() + 1.0) / self.floor_scale)
        scales = torch.log1p(steps) * self.attn_scale + 1.0
        return (q * scales.view(-1, 1, 1)).to(q.dtype)


def take_over_temperatures(body: nn.Module) -> Mapping[nn.Module, PositionTemperature]:
    """By attention module; from here on the modules leave it to the caller of attention."""
    taken = {}
    for module in body.modules():
        layer: Any = module
        if getattr(layer, "attn_temperature_tuning", False) and not layer.use_rope:
            taken[module] = PositionTemperature(layer.floor_scale, layer.attn_scale)
            layer.attn_temperature_tuning = False
    return taken
