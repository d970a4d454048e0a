"""Llama 4's temperature by position, taken over from its layers without rotary embeddings.

Its code counts a query's position from the start of the call, which in a flat batch is another
row's. It is the last thing that happens to a query before attention.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from workers.layers.temperature import PositionTemperature


def take_over_temperatures(body: nn.Module) -> Mapping[nn.Module, PositionTemperature]:
    """By attention module; from here on the modules leave it to the caller of attention."""
    taken = {}
    for module in body.modules():
        layer: Any = module
        if getattr(layer, "attn_temperature_tuning", False) and not layer.use_rope:
            taken[module] = PositionTemperature(layer.floor_scale, layer.attn_scale)
            layer.attn_temperature_tuning = False
    return taken
