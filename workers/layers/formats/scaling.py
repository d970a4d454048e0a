"""What of a matrix has a scale in common: all of it, a row, or a block."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from workers.layers.formats.format import Cut, Shape, check_on_border, in_blocks
from workers.layers.kept.fp8 import BLOCK, Fp8Blocks, Fp8Rows
from workers.layers.kept.weight import KeptWeight


class Scaling(ABC):
    """Scales of one module's matrix, float32."""

    @property
    @abstractmethod
    def title(self) -> str: ...

    @abstractmethod
    def shape(self, whole: tuple[int, int]) -> Shape:
        """Of the scales of a matrix (out_features, in_features)."""

    @abstractmethod
    def slices(self, cut: Cut) -> tuple[slice, ...]:
        """A rank's scales. Raises ConfigError where the cut falls inside of a block."""

    @abstractmethod
    def spread(self, scales: torch.Tensor, cut: Cut) -> torch.Tensor:
        """A rank's scales so that they multiply its (num_rows, num_columns) element by element."""

    @abstractmethod
    def kept_fp8(self, values: torch.Tensor, scales: torch.Tensor) -> KeptWeight | None:
        """A rank's FP8 values with their scales as products take them, or None."""


@dataclass(frozen=True, slots=True)
class PerTensor(Scaling):
    """One for all."""

    @property
    def title(self) -> str:
        return "per tensor"

    def shape(self, whole: tuple[int, int]) -> Shape:
        return (1,)

    def slices(self, cut: Cut) -> tuple[slice, ...]:
        return (slice(0, 1),)

    def spread(self, scales: torch.Tensor, cut: Cut) -> torch.Tensor:
        return scales.reshape(1, 1)

    def kept_fp8(self, values: torch.Tensor, scales: torch.Tensor) -> KeptWeight | None:
        return Fp8Rows.of(values, scales)


@dataclass(frozen=True, slots=True)
class PerChannel(Scaling):
    """One a row, stored as (out_features, 1)."""

    @property
    def title(self) -> str:
        return "per channel"

    def shape(self, whole: tuple[int, int]) -> Shape:
        return (whole[0], 1)

    def slices(self, cut: Cut) -> tuple[slice, ...]:
        return cut.rows, slice(0, 1)

    def spread(self, scales: torch.Tensor, cut: Cut) -> torch.Tensor:
        return scales.reshape(-1, 1)

    def kept_fp8(self, values: torch.Tensor, scales: torch.Tensor) -> KeptWeight | None:
        return Fp8Rows.of(values, scales)


@dataclass(frozen=True, slots=True)
class PerBlock(Scaling):
    """One a block of rows x columns; the last ones of either axis may be cut short."""

    rows: int
    columns: int

    @property
    def title(self) -> str:
        return f"{self.rows}x{self.columns} blocks"

    def shape(self, whole: tuple[int, int]) -> Shape:
        return -(-whole[0] // self.rows), -(-whole[1] // self.columns)

    def slices(self, cut: Cut) -> tuple[slice, ...]:
        check_on_border(cut.rows, self.rows, cut.whole[0], "blocks of rows")
        check_on_border(cut.columns, self.columns, cut.whole[1], "blocks of columns")
        return in_blocks(cut.rows, self.rows), in_blocks(cut.columns, self.columns)

    def spread(self, scales: torch.Tensor, cut: Cut) -> torch.Tensor:
        # A block may be far larger than the matrix.
        rows, columns = min(self.rows, cut.num_rows), min(self.columns, cut.num_columns)
        tall = scales.repeat_interleave(rows, 0)[: cut.num_rows]
        return tall.repeat_interleave(columns, 1)[:, : cut.num_columns]

    def kept_fp8(self, values: torch.Tensor, scales: torch.Tensor) -> KeptWeight | None:
        is_known = (self.rows, self.columns) == (BLOCK, BLOCK)
        return Fp8Blocks.of(values, scales) if is_known else None
