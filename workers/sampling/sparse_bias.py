"""Sparse additions to logits per slot: logit_bias, and the mask that min_tokens needs.

Knows slots, token ids and values, not why they are added. Entries are stored padded, (slot, k);
k is 0 until the first entry and grows to the next power of two when a slot needs more.
"""

import numpy as np
import torch
from torch import Tensor

from workers.sampling.transfer import upload

_MIN_CAPACITY = 8


class SparseBias:
    """token_ids: int64, values: float32, both (max_running_requests, capacity) on the device.

    Padding adds 0.0 to token 0, which changes nothing whatever the order of the additions.
    """

    def __init__(self, max_running_requests: int, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        shape = (max_running_requests, 0)
        self.token_ids = torch.zeros(shape, dtype=torch.int64, device=device)
        self.values = torch.zeros(shape, dtype=torch.float32, device=device)

    @property
    def capacity(self) -> int:
        return self.token_ids.shape[1]

    def set(self, entries_by_slot: dict[int, dict[int, float]]) -> None:
        """Replace what each given slot adds by its {token id: value}; ids lie in the vocabulary."""
        self._grow(max(len(entries) for entries in entries_by_slot.values()))
        num_slots = len(entries_by_slot)
        token_ids = np.zeros((num_slots, self.capacity), dtype=np.int64)
        values = np.zeros((num_slots, self.capacity), dtype=np.float32)
        for row, entries in enumerate(entries_by_slot.values()):
            token_ids[row, : len(entries)] = list(entries.keys())
            values[row, : len(entries)] = list(entries.values())
        slots = np.array(list(entries_by_slot.keys()), dtype=np.int64)
        uploaded = upload([slots, token_ids, values], self.token_ids.device)
        self.token_ids.index_copy_(0, uploaded[0], uploaded[1])
        self.values.index_copy_(0, uploaded[0], uploaded[2])

    def add_to_(self, logits: Tensor, rows: Tensor, slots: Tensor) -> None:
        """logits[rows[i]] += what slots[i] adds, in place.

        logits: contiguous float32 (n, vocab). rows, slots: int64 (m,).
        """
        entries = self.token_ids.index_select(0, slots) + rows.unsqueeze(1) * self._vocab_size
        values = self.values.index_select(0, slots)
        logits.view(-1).scatter_add_(0, entries.view(-1), values.view(-1))

    def _grow(self, num_entries: int) -> None:
        if num_entries <= self.capacity:
            return
        capacity = max(_MIN_CAPACITY, 1 << (num_entries - 1).bit_length())
        extra = capacity - self.capacity
        self.token_ids = torch.nn.functional.pad(self.token_ids, (0, extra))
        self.values = torch.nn.functional.pad(self.values, (0, extra))
