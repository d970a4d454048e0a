"""Activations between the two halves of a gated feed-forward block."""

import torch
from torch import nn
from torch.nn import functional


class SiluAndMul(nn.Module):
    """(n, 2 * d) -> (n, d): silu of the first half times the second (SwiGLU, Shazeer 2020)."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up
