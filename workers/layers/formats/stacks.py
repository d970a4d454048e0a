"""MXFP4 of many matrices in one tensor, as gpt-oss stores its experts': blocks and scales.

<stack>_blocks: uint8 (matrices, rows, groups, 16), <stack>_scales: uint8 (matrices, rows, groups).
Knows no file.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from workers.errors import ConfigError
from workers.layers.formats.fills import bits
from workers.layers.formats.format import check_on_border, in_blocks
from workers.layers.formats.mxfp4 import DUMMY_SCALES, GROUP_SIZE, Mxfp4, dequantise_mxfp4
from workers.layers.formats.stored import Arrivals, StoredSlot, check_finite
from workers.layers.sharding import TensorSource

_FILLS = {"blocks": bits, "scales": DUMMY_SCALES}

Take = Callable[[int, torch.Tensor, torch.Tensor], None]
"""Place of a matrix in the cut, its blocks uint8 (rows, groups, 16) and scales (rows, groups)."""


@dataclass(frozen=True, slots=True)
class StackCut:
    """Of a whole stack (matrices, rows, columns), what a rank holds. Raises ConfigError where
    columns, all of them or its own, are no whole groups."""

    whole: tuple[int, int, int]
    matrices: slice
    rows: slice
    columns: slice

    def __post_init__(self) -> None:
        if self.whole[2] % GROUP_SIZE:
            raise ConfigError(f"{self.whole[2]} columns are no whole groups of {GROUP_SIZE}")
        check_on_border(self.columns, GROUP_SIZE, self.whole[2], "groups")

    def shape(self, part: str) -> tuple[int, ...]:
        """Of the whole tensor. part: "blocks" or "scales"."""
        groups = (*self.whole[:2], self.whole[2] // GROUP_SIZE)
        return (*groups, GROUP_SIZE // 2) if part == "blocks" else groups

    def slices(self, part: str) -> tuple[slice, ...]:
        slices = self.matrices, self.rows, in_blocks(self.columns, GROUP_SIZE)
        return (*slices, slice(0, GROUP_SIZE // 2)) if part == "blocks" else slices


def dequantising(name: str, take: Callable[[int, torch.Tensor], None]) -> Take:
    """take: gets each matrix, (rows, columns) float32, of the stack of that name."""

    def take_stored(place: int, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        matrix = dequantise_mxfp4(blocks, scales)
        check_finite(matrix, name)
        take(place, matrix)

    return take_stored


class StoredStack:
    """A stack while it is being read. take: gets each matrix."""

    def __init__(self, cut: StackCut, take: Take, device: torch.device) -> None:
        self._cut, self._take, self._device = cut, take, device
        self._tensors: dict[str, torch.Tensor] = {}
        self._arrivals = Arrivals(len(_FILLS))

    def load(self, part: str, source: TensorSource) -> None:
        first, *others = self._cut.slices(part)
        pieces = [
            source[(slice(matrix, matrix + 1), *others)].to(self._device, copy=True)
            for matrix in range(first.start, first.stop)
        ]
        self._tensors[part] = torch.cat(pieces)

    def settle(self) -> None:
        """Called behind every part that is in place."""
        if not self._arrivals.is_last():
            return
        blocks, scales = self._tensors["blocks"], self._tensors["scales"]
        for place in range(len(blocks)):
            self._take(place, blocks[place], scales[place])
        if blocks.is_cuda:
            # Both lie in the pools of other streams, which may write there when they are released.
            torch.cuda.current_stream(blocks.device).synchronize()
        self._tensors.clear()


@dataclass(frozen=True, slots=True)
class StackSlot(StoredSlot):
    """Where blocks or scales go."""

    stored: StoredStack

    @property
    def part(self) -> str:
        return self.name_part.rpartition("_")[2]

    @property
    def format_title(self) -> str:
        return Mxfp4().title

    def load(self, tensor: TensorSource) -> None:
        self.stored.load(self.part, tensor)

    def obstacle(self, shape: tuple[int, ...], dtype: torch.dtype) -> str:
        if shape != self.shape:
            return f"has shape {shape}, the config says {self.shape}"
        return "" if dtype == torch.uint8 else f"has dtype {dtype}, mxfp4 says torch.uint8"

    def dummy(self, name: str, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(self.shape, dtype=torch.uint8, device=generator.device)
        _FILLS[self.part](tensor, generator)
        return tensor
