"""First level of KV memory: request slot and token position to cache index.

Knows neither who owns a slot nor which pages are free: the scheduler's accounting decides, the
model runner writes, attention backends read.
"""

import torch


class ReqToTokenPool:
    """req_to_token: int32 (max_running_requests, max_context_len) on the device.

    req_to_token[slot, position] is the cache index (page_id * page_size + offset) of that token's
    K and V. Entries past a request's length are stale, never trusted, and always a valid index:
    the table starts as zeros, which is the dummy page.
    """

    def __init__(
        self, max_running_requests: int, max_context_len: int, device: torch.device
    ) -> None:
        if max_running_requests < 1 or max_context_len < 1:
            raise ValueError(
                f"max_running_requests={max_running_requests} and max_context_len={max_context_len}"
                " must be positive"
            )
        self.max_running_requests = max_running_requests
        self.max_context_len = max_context_len
        self.req_to_token = torch.zeros(
            (max_running_requests, max_context_len), dtype=torch.int32, device=device
        )

    @property
    def num_bytes(self) -> int:
        return self.req_to_token.numel() * self.req_to_token.itemsize

    def write(self, slots: torch.Tensor, start: int, cache_indices: torch.Tensor) -> None:
        """Set positions start .. start + n of slots int64 (m,) to cache_indices int32 (n,), the
        same for each; both on the pool's device. One launch."""
        num_slots, n = slots.shape[0], cache_indices.shape[0]
        columns = self.req_to_token[:, start : start + n]
        columns.index_copy_(0, slots, cache_indices.expand(num_slots, n))
