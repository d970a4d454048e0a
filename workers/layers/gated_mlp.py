"""The gated feed-forward block of most decoders."""

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional

from workers.layers.gate import Gate
from workers.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from workers.layers.sharding import ShardContext


class SiluAndMul(nn.Module):
    """(n, 2 * d) -> (n, d): silu of the first half times the second (SwiGLU, Shazeer 2020)."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up


class GeluAndMul(nn.Module):
    """(n, 2 * d) -> (n, d): GELU, with tanh, of the first half times the second (GEGLU)."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.gelu(gate, approximate="tanh") * up


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)). (n, hidden_size) -> (n, hidden_size)."""

    gate: ClassVar[Gate] = "silu"
    activation: ClassVar[type[nn.Module]] = SiluAndMul

    def __init__(
        self, hidden_size: int, intermediate_size: int, has_bias: bool, shard: ShardContext
    ) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(
            hidden_size, intermediate_size, ("gate_proj", "up_proj"), has_bias, shard
        )
        self.act = self.activation()
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, has_bias, shard)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act(self.gate_up_proj(x)))
        return out


class GeluGatedMLP(GatedMLP):
    """down(gelu(gate(x)) * up(x)), GELU by its approximation with tanh."""

    gate = "gelu_tanh"
    activation = GeluAndMul
