"""Token ids per slot, on the device, padded with 0. Knows not what they are for."""

import numpy as np
import torch
from torch import Tensor

from workers.sampling.transfer import upload


class TokenIdTable:
    """token_ids: int64 (max_running_requests, capacity), the longest list that any slot has had."""

    def __init__(self, max_running_requests: int, device: torch.device) -> None:
        self.token_ids = torch.zeros((max_running_requests, 0), dtype=torch.int64, device=device)

    @property
    def capacity(self) -> int:
        return self.token_ids.shape[1]

    def set(self, ids_by_slot: dict[int, tuple[int, ...]]) -> None:
        """Replace the ids of each given slot."""
        more = max(map(len, ids_by_slot.values())) - self.capacity
        if more > 0:
            self.token_ids = torch.nn.functional.pad(self.token_ids, (0, more))
        rows = np.zeros((len(ids_by_slot), self.capacity), dtype=np.int64)
        for row, ids in zip(rows, ids_by_slot.values(), strict=True):
            row[: len(ids)] = ids
        slots = np.array(list(ids_by_slot), dtype=np.int64)
        indices, values = upload([slots, rows], self.token_ids.device)
        self.token_ids.index_copy_(0, indices, values)

    def take(self, slots: Tensor) -> Tensor:
        """int64 (n, capacity) of slots int64 (n,)."""
        return self.token_ids.index_select(0, slots)
