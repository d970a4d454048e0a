"""FP8 weights (E4M3) with a scale a row, or one a block of 128 x 128."""

from collections.abc import Sequence
from typing import Self

import torch
from torch import nn

from workers.layers.kept.weight import KeptWeight

BLOCK = 128
_MULTIPLE = 16
_NOT_A_NUMBER = 0x7F
_LARGEST = 448.0


class Fp8Rows(KeptWeight):
    """values: float8_e4m3fn (out_features, in_features), contiguous. scales: float32
    (out_features,); one scale of all is repeated."""

    def __init__(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.values = nn.Buffer(values.contiguous())
        self.scales = nn.Buffer(scales.float().reshape(-1).expand(self.out_features).contiguous())

    @classmethod
    def of(cls, values: torch.Tensor, scales: torch.Tensor) -> Self | None:
        """None where products have no such sizes: both multiples of 16, and rows at all. scales:
        (1,) or (out_features, 1)."""
        has_sizes = all(size % _MULTIPLE == 0 for size in values.shape) and values.numel() > 0
        return cls(values, scales) if has_sizes else None

    @classmethod
    def joined(cls, pieces: Sequence[Self]) -> Self:
        return cls(_stacked([x.values for x in pieces]), torch.cat([x.scales for x in pieces]))

    def from_row(self, first: int) -> Self:
        if first % _MULTIPLE:
            raise ValueError(f"row {first} is no multiple of {_MULTIPLE}")
        return type(self)(self.values[first:], self.scales[first:])

    def is_finite(self) -> bool:
        return _are_numbers(self.values) and _are_in_range(self.scales)

    def dequantised(self) -> torch.Tensor:
        return self.values.float() * self.scales.unsqueeze(1)


class Fp8Blocks(KeptWeight):
    """values: as of Fp8Rows, of whole blocks. scales: float32 (out_features / 128, in_features /
    128), contiguous."""

    def __init__(self, values: torch.Tensor, scales: torch.Tensor) -> None:
        super().__init__()
        self.out_features, self.in_features = values.shape
        self.values = nn.Buffer(values.contiguous())
        self.scales = nn.Buffer(scales.float().contiguous())

    @classmethod
    def of(cls, values: torch.Tensor, scales: torch.Tensor) -> Self | None:
        """None where the last block of either axis is cut short."""
        return None if any(size % BLOCK for size in values.shape) else cls(values, scales)

    @classmethod
    def joined(cls, pieces: Sequence[Self]) -> Self:
        return cls(_stacked([x.values for x in pieces]), torch.cat([x.scales for x in pieces]))

    def is_finite(self) -> bool:
        return _are_numbers(self.values) and _are_in_range(self.scales)

    def dequantised(self) -> torch.Tensor:
        spread = self.scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        return self.values.float() * spread


def _stacked(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """As bytes: not every device joins FP8 tensors."""
    joined = torch.cat([x.view(torch.uint8) for x in values])
    return joined.view(torch.float8_e4m3fn)


def _are_numbers(values: torch.Tensor) -> bool:
    """E4M3 has no infinity, and one magnitude that is no number."""
    magnitudes = values.view(torch.uint8).bitwise_and(_NOT_A_NUMBER)
    return not bool((magnitudes == _NOT_A_NUMBER).any())


def _are_in_range(scales: torch.Tensor) -> bool:
    """Whether each is finite, and so is the largest value of E4M3 times it."""
    return bool((scales * _LARGEST).isfinite().all())
