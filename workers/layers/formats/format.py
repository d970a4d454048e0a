"""What a format of weights answers. Knows no layer, no checkpoint and no recipe.

A format is of one checkpoint module, a matrix (out_features, in_features) of y = x W^T. Rows are
output features, columns input features.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from workers.errors import ConfigError
from workers.layers.kept.weight import KeptWeight

Shape = tuple[int, ...]
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One of a module's tensors in a checkpoint. shape: of the whole one; axes of size 1 do not
    count. dtypes: it may have there; in memory it has the first. fill: what dummy weights have in
    it, written into a tensor of the first dtype."""

    shape: Shape
    dtypes: tuple[torch.dtype, ...]
    fill: Callable[[torch.Tensor, torch.Generator], None]


@dataclass(frozen=True, slots=True)
class Cut:
    """Of a module's whole (out_features, in_features), what a rank holds: rows, columns. Both have
    a start and a stop."""

    whole: tuple[int, int]
    rows: slice
    columns: slice

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def num_columns(self) -> int:
        return int(self.columns.stop - self.columns.start)


class WeightFormat(ABC):
    """How one module's weight is stored. Values are frozen and compare by what they say."""

    @property
    def unread(self) -> tuple[str, ...]:
        """Parts that a checkpoint may have beside the tensors, of which nothing is made here."""
        return ()

    @property
    @abstractmethod
    def title(self) -> str:
        """What displays call it, such as "fp8 (128x128 blocks)"."""

    @abstractmethod
    def tensors(self, whole: tuple[int, int]) -> Mapping[str, StoredTensor]:
        """Name part in the checkpoint ("weight", "weight_scale") -> tensor, of a module (out, in).

        Raises ConfigError where a module of this shape cannot be stored so.
        """

    @abstractmethod
    def slices(self, part: str, cut: Cut) -> tuple[slice, ...]:
        """Which slice of that tensor a rank reads. Raises ConfigError where the cut falls inside of
        what has a scale in common."""

    def kept(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> KeptWeight | None:
        """The same in the form that products on GPUs take; None where there are none of it."""
        return None

    def kept_unread(self, cut: Cut) -> KeptWeight | None:
        """As kept, from shapes alone: on the meta device."""
        tensors = {}
        for part, stored in self.tensors(cut.whole).items():
            shape = [piece.stop - piece.start for piece in self.slices(part, cut)]
            tensors[part] = torch.empty(shape, dtype=stored.dtypes[0], device="meta")
        return self.kept(tensors, cut)

    @abstractmethod
    def dequantise(self, tensors: Mapping[str, torch.Tensor], cut: Cut) -> torch.Tensor:
        """What slices of all tensors stand for: (cut.num_rows, cut.num_columns), float32."""


def check_on_border(cut: slice, size: int, whole: int, what: str) -> None:
    """Raise ConfigError unless cut begins and ends at multiples of size, or where the whole ends.

    what: such as "rows of blocks", for the message.
    """
    if cut.start % size or (cut.stop % size and cut.stop != whole):
        raise ConfigError(
            f"tensor parallelism cuts weights at [{cut.start}, {cut.stop}) of {whole}, inside of "
            f"{what} of {size}; choose a tp_size whose cuts fall on multiples of {size}"
        )


def in_blocks(cut: slice, size: int) -> slice:
    """The blocks of size that a cut on their borders covers."""
    return slice(cut.start // size, -(-cut.stop // size))
