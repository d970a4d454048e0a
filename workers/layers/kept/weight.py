"""What a layer keeps of a weight whose products are made with what a checkpoint stores."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import torch
from torch import nn


class KeptWeight(nn.Module):
    """A matrix (out_features, in_features) of y = x W^T in another form than its elements. Its
    tensors are buffers. dtypes: of x, that products take."""

    dtypes: ClassVar[tuple[torch.dtype, ...]] = (torch.bfloat16,)
    out_features: int
    in_features: int

    @classmethod
    @abstractmethod
    def joined(cls, pieces: Sequence[Self]) -> Self | None:
        """Pieces of one in_features whose rows lie one after another, as one; None where they have
        no form in common."""

    def from_row(self, first: int) -> Self:
        """The rows from that one on, in the same memory. Raises ValueError for a form, or a row,
        at which products do not take it apart."""
        raise ValueError(f"{type(self).__name__} is multiplied by whole, not from row {first} on")

    @abstractmethod
    def is_finite(self) -> bool:
        """Whether every element is a number. Waits for the device."""

    @abstractmethod
    def dequantised(self) -> torch.Tensor:
        """(out_features, in_features) float32: what every product is held against."""


def join_kept(pieces: Sequence[KeptWeight | None], dtype: torch.dtype) -> KeptWeight | None:
    """One weight of all pieces' rows for x of dtype, or None where they are of several forms, of
    none, or of one whose products do not take it."""
    first = pieces[0]
    if first is None or any(type(piece) is not type(first) for piece in pieces):
        return None
    if dtype not in first.dtypes:
        return None
    return first if len(pieces) == 1 else type(first).joined([x for x in pieces if x is not None])
