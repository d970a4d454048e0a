"""allowed_token_ids: the only tokens that a slot may sample, as a mask on the device.

Knows slots and token ids, not requests. One byte per slot and vocabulary entry.
"""

import numpy as np
import torch
from torch import Tensor

from workers.sampling.transfer import upload


class AllowedTokens:
    """mask: bool (max_running_requests, vocab_size), without rows until the first set()."""

    def __init__(self, max_running_requests: int, vocab_size: int, device: torch.device) -> None:
        self._shape = (max_running_requests, vocab_size)
        self.mask = torch.zeros((0, vocab_size), dtype=torch.bool, device=device)

    def set(self, ids_by_slot: dict[int, tuple[int, ...]]) -> None:
        """Replace what each given slot may sample; ids lie in the vocabulary."""
        if len(self.mask) == 0:
            self.mask = self.mask.new_zeros(self._shape)
        slots = np.array(list(ids_by_slot), dtype=np.int64)
        starts = np.repeat(slots * self._shape[1], [len(ids) for ids in ids_by_slot.values()])
        entries = np.concatenate([np.array(ids, dtype=np.int64) for ids in ids_by_slot.values()])
        slots_on_device, entries_on_device = upload([slots, starts + entries], self.mask.device)
        self.mask.index_fill_(0, slots_on_device, False)
        self.mask.view(-1).index_fill_(0, entries_on_device, True)

    def release(self) -> None:
        """Back to no rows: no slot is restricted."""
        self.mask = self.mask.new_zeros((0, self._shape[1]))

    def ruled_out(self, logits: Tensor, slots: Tensor) -> Tensor:
        """A copy of logits, float32 (n, vocab), -inf where slots int64 (n,) may not sample."""
        return logits.masked_fill(~self.mask.index_select(0, slots), -torch.inf)
