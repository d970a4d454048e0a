"""Where a result goes: what makes its tensor is an argument. Knows no kernel."""

from typing import Protocol

import torch


class NewTensor(Protocol):
    """torch.empty, or what hands out memory that is there: other ranks read it, or graphs."""

    def __call__(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor: ...
