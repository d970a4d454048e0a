"""Two matrices whose product is added to a weight."""

from typing import NamedTuple

import torch


class LowRank(NamedTuple):
    """a (rank, in_features), b (out_features, rank), of one dtype. The scale is in one of them. Of
    several experts: a (experts, rank, in_features), b (experts, out_features, rank)."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return self.b.shape[-1]

    def copied(self, is_pinned: bool) -> "LowRank":
        """Contiguous, in memory of its own."""
        both = (one.clone(memory_format=torch.contiguous_format) for one in self)
        return LowRank(*(one.pin_memory() if is_pinned else one for one in both))
