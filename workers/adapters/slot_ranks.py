"""Of each device slot the ranks of its adapter, on the device and the same on the host."""

from collections.abc import Sequence

import numpy as np
import torch

from workers.sampling.transfer import upload


class SlotRanks:
    """on_device: int32 (num_slots + 1, parts), 0 for a part that a slot's adapter leaves as it is.
    Slot 0 is no adapter's."""

    def __init__(self, num_slots: int, num_parts: int, device: torch.device) -> None:
        size = num_slots + 1, num_parts
        self.on_device = torch.zeros(size, dtype=torch.int32, device=device)
        self._on_host = [[0] * num_parts for _ in range(num_slots + 1)]

    def of(self, slot: int) -> Sequence[int]:
        """By part."""
        return self._on_host[slot]

    def set(self, slot: int, ranks: Sequence[int]) -> None:
        self._on_host[slot] = list(ranks)
        (uploaded,) = upload([np.array(ranks, dtype=np.int32)], self.on_device.device)
        self.on_device[slot].copy_(uploaded)
