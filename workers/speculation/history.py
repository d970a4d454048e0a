"""The tokens of every slot, on the device: what proposers look things up in. Kept by the runner."""

from collections.abc import Sequence

import numpy as np
import torch

from workers.scheduler.plan import AdmittedRequest


class TokenHistory:
    """token_ids: int32 (num_slots, max_context_len); what stands behind a slot's tokens is any."""

    def __init__(self, num_slots: int, max_context_len: int, device: torch.device) -> None:
        # On a CPU, memory is taken where tokens come to stand.
        zeros = np.zeros((num_slots, max_context_len), dtype=np.int32)
        self.token_ids = torch.from_numpy(zeros).to(device)

    def admit(self, requests: Sequence[AdmittedRequest]) -> None:
        """Take over the slots of requests with their known_ids."""
        for request in requests:
            known = torch.from_numpy(request.known_ids.copy())
            self.token_ids[request.slot, : len(known)] = known.to(self.token_ids.device)

    def extend(self, slots: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Token ids that stand at positions of slots, all int64 (n,)."""
        self.token_ids[slots, positions] = token_ids.int()
