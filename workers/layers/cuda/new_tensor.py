"""Where a GEMM's product goes: what makes the tensor is an argument. Knows no GEMM."""

from typing import Protocol

import torch


class NewTensor(Protocol):
    """torch.empty, or what hands out memory that other ranks read."""

    def __call__(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor: ...
